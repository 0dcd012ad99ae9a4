// Notes every error from the very start of the page.
window.seen = {errors: []};
addEventListener("error", (event) => window.seen.errors.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => window.seen.errors.push(event.violatedDirective));
const complain = console.error;
console.error = (...words) => { window.seen.errors.push(words.join(" ")); complain(...words); };
