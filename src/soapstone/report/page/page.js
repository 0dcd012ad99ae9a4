// Draws the report from the JSON document in #data. Text from the document is only ever set as text.
"use strict";

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";

  // -- making elements ------------------------------------------------------------------------------

  function element(name, attributes = {}, ...children) {
    return filled(document.createElement(name), attributes, children);
  }

  function drawn(name, attributes = {}, ...children) {
    return filled(document.createElementNS(SVG, name), attributes, children);
  }

  function filled(made, attributes, children) {
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
      else made.setAttribute(key, value);
    }
    for (const child of children) made.append(child);
    return made;
  }

  function body(section) {
    return document.querySelector(`#${section} .body`);
  }

  function table(caption, headings, rows) {
    const isNumber = headings.map((heading) => heading.startsWith("#"));
    const head = headings.map((heading, i) =>
      element("th", isNumber[i] ? { class: "n", scope: "col" } : { scope: "col" }, heading.replace("#", "")));
    const lines = rows.map((row) => element("tr", {}, ...row.map((cell, i) =>
      i === 0 ? element("th", { scope: "row" }, cell) : element("td", isNumber[i] ? { class: "n" } : {}, cell))));
    return element("table", {}, element("caption", {}, caption),
      element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...lines));
  }

  function folded(summary, content) {
    return element("details", {}, element("summary", {}, summary), element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": summary }, content));
  }

  // -- quantities as people write them --------------------------------------------------------------

  function scaled(value, units) {
    for (const [factor, unit] of units) {
      if (Math.abs(value) >= factor) return `${short(value / factor)} ${unit}`;
    }
    const [factor, unit] = units[units.length - 1];
    return `${short(value / factor)} ${unit}`;
  }

  function short(number) {
    if (Math.abs(number) >= 1000) return Math.round(number).toLocaleString("en");
    return String(Number(number.toPrecision(4)));
  }

  const seconds = (value) => scaled(value, [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]]);
  const bytes = (value) => scaled(value, [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]]);
  const count = (value) => scaled(value, [[1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]]).trim();
  const percent = (part) => `${(100 * part).toFixed(part > 0 && part < 0.1 ? 1 : 0)} %`;

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  // Devices of a node share a hue; the numbers in the cells tell them apart without colour.
  function deviceColour(number) {
    const node = data.devices[number].node;
    const mates = data.devices.map((_, i) => i).filter((i) => data.devices[i].node === node);
    const place = mates.indexOf(number);
    const isOneNode = data.nodes.length === 1;
    const hue = isOneNode ? (place * 360) / mates.length : (node * 360) / data.nodes.length;
    const shift = isOneNode ? 0 : mates.length > 1 ? (place / (mates.length - 1) - 0.5) * 22 : 0;
    return `hsl(${hue} var(--cell-sat) calc(var(--cell-light) + ${shift}%))`;
  }
  const deviceColours = data.devices.map((_, i) => deviceColour(i));

  // -- the verdict ------------------------------------------------------------------------------------

  function fact(name, value, note, mood = "") {
    return element("div", { class: "fact" }, element("dt", {}, name),
      element("dd", { class: mood }, value, element("small", {}, note)));
  }

  function showVerdict() {
    const fullest = data.memory.reduce((best, each, i) =>
      each.peak_bytes / each.capacity_bytes > data.memory[best].peak_bytes / data.memory[best].capacity_bytes ? i : best, 0);
    const memory = data.memory[fullest];
    const usable = data.rivals.filter((rival) => rival.fits !== false);
    const best = usable.reduce((a, b) => (a === null || b.bucketed_s < a.bucketed_s ? b : a), null);
    const whichFit = usable.length < data.rivals.length ? " that fits" : "";
    const step_s = data.bucketed_s;  // as the plan is trained; the timeline sums each gradient by itself
    const facts = [fact("per iteration", seconds(step_s), `compute times are ${data.costs}`)];
    if (data.samples && step_s) {
      facts.push(fact("throughput", `${short(data.samples / step_s)} /s`, `samples, ${data.samples} a step`));
    }
    if (best !== null && step_s) {
      facts.push(fact("speedup", `${short(best.bucketed_s / step_s)} ×`, `over ${best.name}, the fastest baseline${whichFit}`, best.bucketed_s < step_s * 0.995 ? "bad" : ""));
    }
    facts.push(fact("memory", percent(memory.peak_bytes / memory.capacity_bytes),
      `${bytes(memory.peak_bytes)} of ${bytes(memory.capacity_bytes)} on ${data.devices[fullest].name}`, data.fits ? "" : "bad"));
    facts.push(fact("over links", bytes(data.moved_bytes), "in one iteration"));
    if (data.actual !== null) {
      facts.push(fact("as it ran", seconds(data.actual.makespan_s),
        step_s ? `${short(data.actual.makespan_s / step_s)} times the prediction` : ""));
    }
    const place = body("verdict");
    place.append(element("dl", { class: "facts" }, ...facts));
    if (!data.fits) place.append(element("p", { class: "bad" }, "The plan does not fit in the devices' memory."));
    place.append(element("p", { class: "why" }, data.why.join(" ")));
    if (data.rivals.length) place.append(rivalsTable());
    place.append(element("p", { class: "note" },
      `${count(data.parameters)} parameters, ${data.devices.length} device${data.devices.length === 1 ? "" : "s"}, ${data.timeline.count.toLocaleString("en")} tasks, optimizer ${data.optimizer}. Times above are with small gradients summed together, as in training; with each summed by itself, as below, an iteration takes ${seconds(data.makespan_s)}.`));
  }

  function rivalsTable() {
    const slowest = Math.max(data.bucketed_s, ...data.rivals.map((rival) => rival.bucketed_s));
    const line = (name, step_s, memory, summary) => [
      name, seconds(step_s), data.bucketed_s ? `${short(step_s / data.bucketed_s)} ×` : "", memory, barOf(step_s / slowest), summary];
    const rows = data.rivals.map((rival) => line(rival.name, rival.bucketed_s, memoryOf(rival), rival.summary));
    const peak_bytes = Math.max(...data.memory.map((each) => each.peak_bytes));
    rows.push(line("this plan", data.bucketed_s, data.fits ? bytes(peak_bytes) : tooLarge(bytes(peak_bytes)), ""));
    return table("The plan beside the baselines that apply",
      ["strategy", "#per iteration", "#speedup of the plan", "#most memory of a device", "", "what it is"], rows);
  }

  function memoryOf(rival) {
    if (rival.needed_bytes === null) return "";
    const peak = bytes(rival.needed_bytes);
    return rival.fits ? peak : tooLarge(peak);
  }

  function tooLarge(text) {
    return element("span", { class: "bad" }, `${text}: does not fit`);
  }

  function barOf(part) {
    const bar = element("span", { class: "bar", "aria-hidden": "true" });
    bar.style.width = `${Math.max(1, Math.round(140 * (part || 0)))}px`;
    return bar;
  }

  // -- the strategy -----------------------------------------------------------------------------------

  function showStrategy() {
    const place = body("strategy");
    const panel = element("div", { class: "panel", role: "status", "aria-live": "polite" }, "Choose a tile to read what was decided.");
    let pressed = null;
    const tileButton = (box, tile) => {
      const text = `${box.name}: ${tile.split}, on devices ${devicesOf(tile).join(", ")}`;
      const button = element("button", { class: "tile", type: "button", title: text, "aria-label": text, "aria-pressed": "false" },
        tilePicture(tile), box.layers > 1 ? `× ${box.layers} layers` : tile.count > 1 ? `× ${tile.count}` : "");
      button.addEventListener("click", () => {
        if (pressed) pressed.setAttribute("aria-pressed", "false");
        pressed = button;
        button.setAttribute("aria-pressed", "true");
        panel.replaceChildren(...tileDetails(box, tile));
      });
      return button;
    };
    place.append(element("p", { class: "note" },
      "A tile is an operator with what follows it. Parts along samples stand below each other; parts along parameters, attributes and sums beside each other; copies are narrow. "
      + "Numbers and colours are devices. A thick frame holds blocks that share weights; alike neighbours are one tile."));
    place.append(deviceLegend());
    place.append(element("div", { class: "picture" }, ...data.boxes.map((box) =>
      element("div", { class: box.shares_weights ? "box shared" : "box" },
        element("h3", {}, box.name, element("small", {}, `${operatorsOf(box)} · ${percent(box.flops_share)} of compute`)),
        element("div", { class: "tiles" }, ...box.tiles.map((tile) => tileButton(box, tile)))))));
    place.append(panel);
    place.append(folded("The strategy as a table", table("What was decided, in the order of the graph",
      ["layers", "operator", "#blocks", "split", "devices", "#parameters", "#compute"],
      data.boxes.flatMap((box) => box.tiles.map((tile) => [box.name, operatorsOf(box), String(tile.count * box.layers), tile.split,
        ranges(devicesOf(tile)), count(box.parameters), percent(box.flops_share)])))));
  }

  const operatorsOf = (box) => box.operators.length > 2 ? `${box.operators[0]}, … (${box.operators.length} sorts)` : box.operators.join(", ");

  function devicesOf(tile) {
    return [...new Set(tile.cells.flat(2))].sort((a, b) => a - b);
  }

  function ranges(numbers) {
    const runs = [];
    for (const number of numbers) {
      const last = runs[runs.length - 1];
      if (last && last[1] === number - 1) last[1] = number;
      else runs.push([number, number]);
    }
    return runs.map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`)).join(", ");
  }

  function tilePicture(tile) {
    const rows = tile.cells.length, columns = tile.cells[0].length, copies = tile.cells[0][0].length;
    const height = Math.min(Math.max(44, rows * 13), 132), width = Math.min(Math.max(44, columns * copies * 15), 240);
    const picture = drawn("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    const high = height / rows, wide = width / columns, narrow = wide / copies;
    tile.cells.forEach((row, y) => row.forEach((devices, x) => devices.forEach((device, copy) => {
      const left = x * wide + copy * narrow, gap = copies > 1 ? 0.25 : 0.75;
      picture.append(drawn("rect", { x: left + gap, y: y * high + 0.75, width: Math.max(narrow - 2 * gap, 0.8), height: Math.max(high - 1.5, 0.8), style: `fill: ${deviceColours[device]}` }));
      if (high >= 10 && narrow >= 13) picture.append(withText(drawn("text", { x: left + narrow / 2, y: (y + 0.5) * high }), String(device)));
    })));
    return picture;
  }

  function withText(made, text) {
    made.textContent = text;
    return made;
  }

  function tileDetails(box, tile) {
    const more = tile.count * box.layers - tile.blocks.length;
    const names = tile.blocks.join(", ") + (more > 0 ? ` and ${more} more` : "");
    return [
      element("p", {}, element("strong", {}, box.name), ` (${box.operators.join(", ")}): ${tile.split}`),
      element("p", {}, `on devices ${ranges(devicesOf(tile))}; output ${tile.shape}`),
      element("p", {}, `${percent(box.flops_share)} of the model's compute, ${count(box.parameters)} parameters${box.shares_weights ? ", shared by its blocks" : ""}`),
      element("p", {}, `blocks: ${names}`),
    ];
  }

  function deviceLegend() {
    const shown = data.nodes.length > 1
      ? data.nodes.map((node, i) => [node, data.devices.findIndex((device) => device.node === i), data.devices.reduce((n, device, j) => (device.node === i ? [...n, j] : n), [])])
      : data.devices.map((device, i) => [device.name, i, [i]]);
    return element("ul", { class: "legend", "aria-label": "Devices" }, ...shown.slice(0, 24).map(([name, device, members]) => {
      const swatch = element("span", { class: "swatch" });
      swatch.style.background = deviceColours[members[Math.floor(members.length / 2)] ?? device];
      return element("li", {}, swatch, `${ranges(members)} ${name}`);
    }), ...(shown.length > 24 ? [element("li", {}, `and ${shown.length - 24} more`)] : []));
  }

  // -- the timeline -----------------------------------------------------------------------------------

  function unpacked(text, Kind) {
    const raw = atob(text), buffer = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i += 1) buffer[i] = raw.charCodeAt(i);
    return new Kind(buffer.buffer);
  }

  const LOOKS = {
    forward: ["--forward", "plain", "forward"], backward: ["--backward", "slant", "backward"],
    transfer: ["--transfer", "dots", "transfer"], update: ["--update", "bars", "update"],
    all_reduce: ["--collective", "cross", "collective"], all_gather: ["--collective", "cross", "collective"],
    reduce_scatter: ["--collective", "cross", "collective"], all_to_all: ["--collective", "cross", "collective"],
    take: ["--transfer", "bars", "taking a message"],
  };

  // A fill for a kind of task: its colour with a texture, so that it is told apart in grey as well.
  function texture(context, kind) {
    const [name, pattern] = LOOKS[kind];
    const base = colour(name), ink = colour("--card");
    if (pattern === "plain") return base;
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const pen = tile.getContext("2d");
    pen.fillStyle = base;
    pen.fillRect(0, 0, 8, 8);
    pen.strokeStyle = pen.fillStyle = ink;
    pen.globalAlpha = 0.55;
    pen.lineWidth = 1.3;
    pen.beginPath();
    if (pattern === "slant" || pattern === "cross") { pen.moveTo(-2, 6); pen.lineTo(6, -2); pen.moveTo(2, 10); pen.lineTo(10, 2); }
    if (pattern === "cross") { pen.moveTo(2, -2); pen.lineTo(10, 6); pen.moveTo(-2, 2); pen.lineTo(6, 10); }
    if (pattern === "bars") { pen.moveTo(0, 2); pen.lineTo(8, 2); pen.moveTo(0, 6); pen.lineTo(8, 6); }
    pen.stroke();
    if (pattern === "dots") { pen.fillRect(1, 1, 2, 2); pen.fillRect(5, 5, 2, 2); }
    return context.createPattern(tile, "repeat");
  }

  const ROW = 20, TOP = 24, MOST_HIGH = 620, SMALL = 3, TICKS = 2 ** 32 - 1;

  class Chart {
    constructor(place) {
      const packed = data.timeline;
      this.rows = packed.rows;
      this.span = packed.span_s;
      this.kind = unpacked(packed.kind, Uint8Array);
      this.row = unpacked(packed.row, Uint16Array);
      this.ids = unpacked(packed.ids, Uint32Array);
      this.sizes = unpacked(packed.size_bytes, Float64Array);
      this.name = unpacked(packed.name, Uint32Array);
      this.names = packed.names.split("\n");
      this.critical = unpacked(packed.critical, Uint8Array);
      this.lanes = [[unpacked(packed.start, Uint32Array), unpacked(packed.end, Uint32Array)]];
      if (packed.actual_start !== null) {
        this.lanes.push([unpacked(packed.actual_start, Uint32Array), unpacked(packed.actual_end, Uint32Array)]);
      }
      this.begin = this.rows.map(() => 0);
      for (const row of this.row) this.begin[row + 1] = (this.begin[row + 1] ?? 0) + 1;
      this.begin[0] = 0;
      for (let i = 1; i <= this.rows.length; i += 1) this.begin[i] = (this.begin[i] ?? 0) + this.begin[i - 1];
      this.orders = this.lanes.map(([start], lane) => this.order(start, lane));
      this.reach = this.lanes.map(([, end], lane) => this.reaches(end, lane));
      this.left = 0; this.right = 1; this.scroll = 0; this.chosen = -1; this.only = false;
      this.build(place);
    }

    // Real starts may come in another order than predicted ones: each lane has its own, per row.
    order(start, lane) {
      const found = new Uint32Array(this.row.length);
      for (let i = 0; i < found.length; i += 1) found[i] = i;
      if (lane === 0) return found;
      for (let row = 0; row < this.rows.length; row += 1) {
        found.subarray(this.begin[row], this.begin[row + 1]).sort((a, b) => start[a] - start[b] || a - b);
      }
      return found;
    }

    // How far the tasks of a row reach up to each one. What really ran on a link may overlap.
    reaches(end, lane) {
      const found = new Uint32Array(end.length);
      for (let row = 0; row < this.rows.length; row += 1) {
        let most = 0;
        for (let at = this.begin[row]; at < this.begin[row + 1]; at += 1) {
          most = Math.max(most, end[this.orders[lane][at]]);
          found[at] = most;
        }
      }
      return found;
    }

    build(place) {
      this.high = this.lanes.length > 1 ? ROW * 1.6 : ROW;
      const height = Math.min(TOP + this.rows.length * this.high + 4, MOST_HIGH);
      this.canvas = element("canvas", { tabindex: "0", role: "application", "aria-label": "Timeline of devices and links", "aria-describedby": "timeline-keys" });
      this.canvas.style.height = `${height}px`;
      this.panel = element("div", { class: "panel", role: "status", "aria-live": "polite" }, "Point at a task, or walk along them with n and p.");
      const button = (text, label, act) => element("button", { type: "button", "aria-label": label, onclick: act }, text);
      const path = element("button", { type: "button", "aria-pressed": "false" }, "critical path only");
      path.addEventListener("click", () => {
        this.only = !this.only;
        path.setAttribute("aria-pressed", String(this.only));
        this.later();
      });
      place.append(
        element("p", { class: "note", id: "timeline-keys" },
          "Drag to move; Ctrl and the wheel, or + and −, to zoom; arrows to move; Home for all of it; n and p for the next and the previous task of the row, c for the next of the critical path, which is framed in pink."
          + (this.lanes.length > 1 ? " In each row, the upper half is the prediction and the lower half what was measured." : "")),
        this.legend(),
        element("div", { class: "tools" }, button("+", "Zoom in", () => this.zoom(0.5)), button("−", "Zoom out", () => this.zoom(2)),
          button("◀", "Move left", () => this.pan(-0.2)), button("▶", "Move right", () => this.pan(0.2)), button("all", "Show all", () => this.whole()), path),
        element("div", { class: "stage" }, this.canvas), this.panel);
      this.listen();
      new ResizeObserver(() => this.later()).observe(this.canvas);
    }

    legend() {
      const shown = new Map(data.kinds.map((kind) => [LOOKS[kind][2], kind]));
      this.samples = [...shown].map(([name, kind]) => {
        const sample = element("canvas", { width: "22", height: "12", "aria-hidden": "true" });
        return [element("li", {}, sample, name), sample, kind];
      });
      return element("ul", { class: "legend", "aria-label": "Kinds of tasks" }, ...this.samples.map(([item]) => item));
    }

    listen() {
      const canvas = this.canvas;
      let drag = null;
      canvas.addEventListener("pointerdown", (event) => {
        drag = { x: event.offsetX, y: event.offsetY, left: this.left, right: this.right, scroll: this.scroll, moved: false };
        canvas.setPointerCapture(event.pointerId);
      });
      canvas.addEventListener("pointermove", (event) => {
        if (drag === null) {
          canvas.title = this.describe(this.at(event.offsetX, event.offsetY));
          return;
        }
        const dx = event.offsetX - drag.x, dy = event.offsetY - drag.y;
        drag.moved = drag.moved || Math.abs(dx) + Math.abs(dy) > 3;
        const by = -dx / this.width * (drag.right - drag.left);
        this.show(drag.left + by, drag.right + by);
        this.scrollTo(drag.scroll - dy);
      });
      canvas.addEventListener("pointerup", (event) => {
        if (drag !== null && !drag.moved) this.choose(this.at(event.offsetX, event.offsetY));
        drag = null;
      });
      canvas.addEventListener("pointercancel", () => { drag = null; });
      canvas.addEventListener("wheel", (event) => {
        if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(event.deltaY / 300), this.timeAt(event.offsetX));
        else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan((event.deltaX || event.deltaY) / 800);
        else if (!this.scrollTo(this.scroll + event.deltaY)) return;
        event.preventDefault();
      }, { passive: false });
      canvas.addEventListener("dblclick", (event) => this.zoom(0.4, this.timeAt(event.offsetX)));
      canvas.addEventListener("keydown", (event) => {
        const acts = {
          "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), Home: () => this.whole(),
          ArrowLeft: () => this.pan(-0.15), ArrowRight: () => this.pan(0.15),
          ArrowUp: () => this.scrollTo(this.scroll - this.high), ArrowDown: () => this.scrollTo(this.scroll + this.high),
          n: () => this.walk(1), p: () => this.walk(-1), c: () => this.walkCritical(),
        };
        if (!(event.key in acts) || event.ctrlKey || event.metaKey || event.altKey) return;
        acts[event.key]();
        event.preventDefault();
      });
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.repaint());
      addEventListener("beforeprint", () => this.repaint());
      addEventListener("afterprint", () => this.repaint());
    }

    // Where things are.

    measure(width) {
      this.gutter = Math.min(190, width * 0.25);
      this.width = Math.max(width - this.gutter, 1);
    }
    timeAt(x) { return this.left + (x - this.gutter) / this.width * (this.right - this.left); }
    xOf(part) { return this.gutter + (part - this.left) / (this.right - this.left) * this.width; }

    at(x, y) {
      const row = Math.floor((y - TOP + this.scroll) / this.high);
      if (x < this.gutter || y < TOP || row < 0 || row >= this.rows.length) return -1;
      const within = (y - TOP + this.scroll) / this.high - row;
      const lane = this.lanes.length > 1 && within > 0.5 ? 1 : 0;
      const slack = 2 * (this.right - this.left) / this.width;
      const time = this.timeAt(x), at = this.first(row, lane, (time - slack) * TICKS);
      const task = at < this.begin[row + 1] ? this.orders[lane][at] : -1;
      return task >= 0 && this.lanes[lane][0][task] <= (time + slack) * TICKS ? task : -1;
    }

    // The place in a row of the first task that ends after a tick.
    first(row, lane, tick) {
      let low = this.begin[row], high = this.begin[row + 1];
      const reach = this.reach[lane];
      while (low < high) {
        const middle = (low + high) >> 1;
        if (reach[middle] > tick) high = middle;
        else low = middle + 1;
      }
      return low;
    }

    // Moving about.

    show(left, right) {
      const span = Math.min(Math.max(right - left, 1e-7), 1);
      this.left = Math.min(Math.max(left, 0), 1 - span);
      this.right = this.left + span;
      this.later();
    }
    zoom(factor, about = (this.left + this.right) / 2) {
      this.show(about - (about - this.left) * factor, about + (this.right - about) * factor);
    }
    pan(part) {
      const by = part * (this.right - this.left);
      this.show(this.left + by, this.right + by);
    }
    whole() { this.scroll = 0; this.show(0, 1); }
    scrollTo(offset) {
      const most = Math.max(this.rows.length * this.high - (this.canvas.clientHeight - TOP), 0), before = this.scroll;
      this.scroll = Math.min(Math.max(offset, 0), most);
      this.later();
      return this.scroll !== before;
    }

    // Choosing a task.

    describe(task) {
      if (task < 0) return "";
      const length = ([start, end]) => seconds((end[task] - start[task]) / TICKS * this.span);
      const start = seconds(this.lanes[0][0][task] / TICKS * this.span);
      const moved = this.sizes[task] ? `, ${bytes(this.sizes[task])}` : "";
      const real = this.lanes.length > 1 ? `; measured ${length(this.lanes[1])}` : "";
      const path = this.critical[task] ? "; on the critical path" : "";
      return `${this.names[this.name[task]]}: ${data.kinds[this.kind[task]].replaceAll("_", "-")} on ${this.rows[this.row[task]]}, ${length(this.lanes[0])} from ${start}${moved}${real}${path}`;
    }

    choose(task) {
      this.chosen = task;
      if (task >= 0) this.panel.textContent = `task ${this.ids[task]}: ${this.describe(task)}`;
      this.later();
    }

    reveal(task) {
      const [start, end] = this.lanes[0], a = start[task] / TICKS, b = end[task] / TICKS;
      if (a < this.left || b > this.right) {
        const span = Math.max(this.right - this.left, (b - a) * 1.5);
        this.show((a + b - span) / 2, (a + b + span) / 2);
      }
      const y = this.row[task] * this.high, view = this.canvas.clientHeight - TOP;
      if (y < this.scroll || y + this.high > this.scroll + view) this.scrollTo(y - view / 2);
      this.choose(task);
    }

    walk(step) {
      const count = this.row.length;
      if (!count) return;
      const next = this.chosen < 0 ? 0 : this.chosen + step;
      this.reveal((next + count) % count);
    }

    walkCritical() {
      const start = this.lanes[0][0];
      const path = Array.from(this.critical.keys()).filter((task) => this.critical[task]).sort((a, b) => start[a] - start[b] || a - b);
      if (path.length) this.reveal(path[(path.indexOf(this.chosen) + 1) % path.length]);
    }

    // Painting: one frame at a time, only what is in view, and at most a task for each pixel of a row.

    later() {
      if (this.waiting) return;
      this.waiting = true;
      requestAnimationFrame(() => { this.waiting = false; this.paint(); });
    }

    repaint() {
      this.fills = null;
      this.paint();
    }

    paint() {
      const canvas = this.canvas, ratio = window.devicePixelRatio || 1;
      const width = canvas.clientWidth, height = canvas.clientHeight;
      this.measure(width);
      if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
        canvas.width = Math.round(width * ratio);
        canvas.height = Math.round(height * ratio);
      }
      const pen = canvas.getContext("2d");
      if (!this.fills) this.mix(pen);
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.clearRect(0, 0, width, height);
      const from = Math.max(Math.floor(this.scroll / this.high), 0);
      const until = Math.min(Math.ceil((this.scroll + height - TOP) / this.high), this.rows.length);
      pen.save();
      pen.beginPath();
      pen.rect(0, TOP, width, height - TOP);
      pen.clip();
      for (let row = from; row < until; row += 1) this.paintRow(pen, row, TOP + row * this.high - this.scroll, width);
      pen.restore();
      this.paintAxis(pen, width, height);
    }

    mix(pen) {
      this.fills = data.kinds.map((kind) => texture(pen, kind));
      this.plain = data.kinds.map((kind) => colour(LOOKS[kind][0]));
      this.inks = { ink: colour("--ink"), soft: colour("--soft"), line: colour("--line"), mark: colour("--mark"), card: colour("--card") };
      for (const [, sample, kind] of this.samples) {
        const brush = sample.getContext("2d");
        brush.clearRect(0, 0, 22, 12);
        brush.fillStyle = texture(brush, kind);
        brush.fillRect(0, 0, 22, 12);
      }
    }

    paintRow(pen, row, y, width) {
      pen.fillStyle = this.inks.line;
      pen.fillRect(0, y + this.high - 0.5, width, row === data.timeline.device_rows - 1 ? 2 : 0.5);
      pen.fillStyle = row < data.timeline.device_rows ? this.inks.ink : this.inks.soft;
      pen.font = "11px system-ui, sans-serif";
      pen.textAlign = "left";
      pen.textBaseline = "middle";
      pen.fillText(this.label(pen, row), 6, y + this.high / 2, this.gutter - 12);
      pen.save();
      pen.beginPath();
      pen.rect(this.gutter, y, this.width, this.high);
      pen.clip();
      const each = (this.high - 4) / this.lanes.length;
      this.lanes.forEach((_, lane) => this.paintLane(pen, row, lane, y + 2 + lane * each, each - (this.lanes.length > 1 ? 1 : 0)));
      pen.restore();
    }

    label(pen, row) {
      const name = row < data.timeline.device_rows ? `${row}: ${this.rows[row]}` : this.rows[row];
      return name.length > 30 ? `${name.slice(0, 29)}…` : name;
    }

    paintLane(pen, row, lane, y, high) {
      const [start, end] = this.lanes[lane], order = this.orders[lane], stop = this.begin[row + 1];
      const right = this.right * TICKS, tick = (this.right - this.left) / this.width * TICKS;
      const isLink = row >= data.timeline.device_rows;
      const top = isLink ? y + high * 0.15 : y, tall = isLink ? high * 0.7 : high;
      let at = this.first(row, lane, this.left * TICKS);
      let run = null; // small tasks of one kind, side by side, are one rectangle
      const finish = () => {
        if (run !== null) this.paintPiece(pen, run, run.x, top, Math.max(run.until - run.x, 0.8), tall);
        run = null;
      };
      while (at < stop) {
        const task = order[at];
        if (start[task] > right) break;
        const x = this.xOf(start[task] / TICKS), until = this.xOf(end[task] / TICKS), wide = until - x;
        const piece = { x, until, kind: this.kind[task], critical: lane === 0 && this.critical[task] === 1 };
        if (wide >= SMALL || task === this.chosen) {
          finish();
          this.paintPiece(pen, piece, x, top, Math.max(wide - (wide > 4 ? 0.6 : 0), 0.8), tall);
          if (wide > 60 && tall >= 12) this.paintName(pen, task, x, top, wide, tall);
          if (task === this.chosen) {
            pen.strokeStyle = this.inks.ink;
            pen.lineWidth = 2;
            pen.strokeRect(x + 1, top + 1, Math.max(wide - 2, 1), tall - 2);
          }
        } else if (run !== null && run.kind === piece.kind && run.critical === piece.critical && x - run.until < 0.6) {
          run.until = Math.max(run.until, until);
        } else {
          finish();
          run = piece;
        }
        // What ends within this very pixel could not be seen: go on with the first that reaches the next.
        at = wide >= 1 ? at + 1 : Math.max(at + 1, this.first(row, lane, start[task] + tick));
      }
      finish();
      pen.globalAlpha = 1;
    }

    paintPiece(pen, piece, x, top, wide, tall) {
      pen.globalAlpha = this.only && !piece.critical ? 0.15 : 1;
      pen.fillStyle = wide < SMALL ? this.plain[piece.kind] : this.fills[piece.kind];
      pen.fillRect(x, top, wide, tall);
      if (piece.critical) {
        pen.fillStyle = this.inks.mark;
        pen.fillRect(x, top, wide, 2);
        pen.fillRect(x, top + tall - 2, wide, 2);
      }
    }

    paintName(pen, task, x, y, wide, tall) {
      pen.save();
      pen.beginPath();
      pen.rect(x, y, wide - 2, tall);
      pen.clip();
      pen.font = "600 10px system-ui, sans-serif";
      pen.textAlign = "left";
      const text = this.names[this.name[task]];
      const left = Math.max(x, this.gutter) + 4, long = Math.min(pen.measureText(text).width + 6, wide - 6);
      pen.fillStyle = this.inks.card;
      pen.globalAlpha *= 0.75;
      pen.fillRect(left - 2, y + 3, long, tall - 6);
      pen.globalAlpha = 1;
      pen.fillStyle = this.inks.ink;
      pen.fillText(text, left, y + tall / 2);
      pen.restore();
    }

    paintAxis(pen, width, height) {
      pen.clearRect(0, 0, width, TOP);
      pen.fillStyle = this.inks.soft;
      pen.strokeStyle = this.inks.line;
      pen.font = "11px system-ui, sans-serif";
      pen.textAlign = "center";
      pen.textBaseline = "middle";
      const visible = (this.right - this.left) * this.span;
      if (!(visible > 0)) return;
      const step = niceStep(visible / Math.max(this.width / 110, 1));
      for (let k = Math.ceil((this.left * this.span) / step - 1e-9); k * step <= this.right * this.span * (1 + 1e-9); k += 1) {
        const x = this.xOf((k * step) / this.span);
        pen.fillText(k === 0 ? "0" : seconds(k * step), Math.min(x, width - 24), TOP / 2);
        pen.beginPath();
        pen.moveTo(x, TOP - 5);
        pen.lineTo(x, TOP);
        pen.stroke();
      }
      if (this.rows.length * this.high > height - TOP) {
        const part = (height - TOP) / (this.rows.length * this.high);
        pen.fillStyle = this.inks.soft;
        pen.fillRect(width - 5, TOP + this.scroll * part, 4, Math.max((height - TOP) * part, 12));
      }
    }
  }

  function niceStep(least) {
    const power = 10 ** Math.floor(Math.log10(least));
    return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least);
  }

  function showTimeline() {
    const place = body("timeline");
    const chart = new Chart(place);
    chart.paint();
    if (data.actual !== null) {
      place.append(table("Predicted and measured time of all tasks of a kind", ["kind", "#predicted", "#measured", "#measured / predicted"],
        data.actual.kinds.map((kind) => [kind.kind.replaceAll("_", "-"), seconds(kind.predicted_s), seconds(kind.actual_s),
          kind.predicted_s ? short(kind.actual_s / kind.predicted_s) : ""])));
    }
    place.append(folded("The critical path as a table", criticalTable(chart)));
    return chart;
  }

  function criticalTable(chart) {
    const [start, end] = chart.lanes[0];
    const path = Array.from(chart.critical.keys()).filter((task) => chart.critical[task]).sort((a, b) => start[a] - start[b] || a - b);
    const longest = [...path].sort((a, b) => (end[b] - start[b]) - (end[a] - start[a])).slice(0, 200).sort((a, b) => start[a] - start[b] || a - b);
    const caption = `${path.length} tasks, each of which begins when the one before it ends` + (longest.length < path.length ? `; the ${longest.length} longest` : "");
    return table(caption, ["#task", "name", "kind", "on", "#start", "#takes"], longest.map((task) => [
      String(chart.ids[task]), chart.names[chart.name[task]], data.kinds[chart.kind[task]].replaceAll("_", "-"), chart.rows[chart.row[task]],
      seconds(start[task] / TICKS * chart.span), seconds((end[task] - start[task]) / TICKS * chart.span)]));
  }

  // -- where the time goes ----------------------------------------------------------------------------

  function showTime() {
    const place = body("time");
    place.append(element("ul", { class: "legend" }, ...[["t-compute", "compute"], ["t-exposed", "communication with nothing to compute"], ["t-idle", "idle"]]
      .map(([name, text]) => element("li", {}, element("span", { class: `swatch ${name}` }), text))));
    const rows = data.times.map((time, i) => {
      const whole = data.makespan_s || 1;
      const stack = element("div", { class: "stack", "aria-hidden": "true" }, ...[["t-compute", time.compute_s], ["t-exposed", time.exposed_s]].map(([name, part]) => {
        const piece = element("i", { class: name });
        piece.style.width = `${(100 * part) / whole}%`;
        return piece;
      }));
      return [`${i}: ${data.devices[i].name}`, stack, seconds(time.compute_s), seconds(time.exposed_s), seconds(Math.max(time.idle_s, 0)), percent(time.compute_s / whole)];
    });
    place.append(element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Time of each device" },
      table("Each device over one iteration", ["device", "", "#compute", "#exposed communication", "#idle", "#computes"], rows)));
  }

  // -- where the bytes go -----------------------------------------------------------------------------

  function showBytes() {
    const place = body("bytes");
    if (!data.traffic.matrix.length) {
      place.append(element("p", {}, "Nothing moves between devices."));
      return;
    }
    place.append(element("div", { class: "two" }, matrixPicture(),
      table("The largest moves, over all their links", ["what", "kind", "#bytes", "#tasks", "#longest"],
        data.traffic.largest.map((move) => [move.name, move.kind.replaceAll("_", "-"), bytes(move.size_bytes), String(move.tasks), seconds(move.longest_s)]))));
    place.append(folded("Bytes between devices as a table", table("Bytes from one device to another, those that are not zero", ["from", "to", "#bytes"],
      [...data.traffic.matrix].sort((a, b) => b[2] - a[2]).slice(0, 500).map(([a, b, size]) => [data.devices[a].name, data.devices[b].name, bytes(size)]))));
  }

  function matrixPicture() {
    const n = data.devices.length, side = Math.min(Math.max(420 / n, 6), 44), edge = 34, size = edge + n * side + 2;
    const most = Math.max(...data.traffic.matrix.map(([, , bytes]) => bytes));
    const picture = drawn("svg", { width: size, height: size, viewBox: `0 0 ${size} ${size}`, role: "img", "aria-label": `Bytes from each device (rows) to each other (columns); the most is ${bytes(most)}` });
    picture.append(drawn("rect", { x: edge, y: edge, width: n * side, height: n * side, style: "fill: var(--faint)" }));
    for (const [a, b, moved] of data.traffic.matrix) {
      const cell = drawn("rect", { x: edge + b * side + 0.5, y: edge + a * side + 0.5, width: side - 1, height: side - 1,
        style: `fill: var(--accent); fill-opacity: ${0.12 + 0.88 * Math.sqrt(moved / most)}` });
      cell.append(withText(drawn("title"), `${data.devices[a].name} to ${data.devices[b].name}: ${bytes(moved)}`));
      picture.append(cell);
    }
    const every = Math.ceil(16 / side);
    for (let i = 0; i < n; i += every) {
      picture.append(withText(drawn("text", { x: edge + (i + 0.5) * side, y: edge - 8, "text-anchor": "middle" }), String(i)));
      picture.append(withText(drawn("text", { x: edge - 6, y: edge + (i + 0.5) * side + 4, "text-anchor": "end" }), String(i)));
    }
    picture.append(withText(drawn("text", { x: edge, y: 11 }), "to device →"));
    picture.append(withText(drawn("text", { x: 11, y: edge + 4, transform: `rotate(90 11 ${edge + 4})` }), "from device →"));
    return element("figure", { style: "margin: 0" }, picture,
      element("figcaption", { class: "note" }, `The stronger, the more, up to ${bytes(most)}; a ring's bytes count for each of its hops.`));
  }

  // -- memory -----------------------------------------------------------------------------------------

  function showMemory() {
    const place = body("memory");
    const panel = element("div", { class: "panel", role: "status", "aria-live": "polite" }, "Choose a device to read what its peak consists of.");
    const charts = data.memory.map((memory, i) => {
      const full = memory.peak_bytes / memory.capacity_bytes;
      const button = element("button", { type: "button", "aria-label": `${data.devices[i].name}: peak ${bytes(memory.peak_bytes)}, ${percent(full)} of its memory` },
        memoryPicture(memory), element("span", { class: full > 1 ? "bad" : "" }, `${i}: ${data.devices[i].name} — ${bytes(memory.peak_bytes)}, ${percent(full)}${full > 1 ? ": does not fit" : ""}`));
      button.addEventListener("click", () => panel.replaceChildren(...peakDetails(memory, i)));
      return element("div", { class: "chart" }, button);
    });
    const order = data.memory.map((_, i) => i).sort((a, b) => data.memory[b].peak_bytes - data.memory[a].peak_bytes || a - b);
    const shown = charts.length > 12 ? order.slice(0, 12).sort((a, b) => a - b).map((i) => charts[i]) : charts;
    place.append(element("div", { class: "charts" }, ...shown), panel);
    if (shown.length < charts.length) {
      const rest = charts.filter((chart) => !shown.includes(chart));
      place.append(element("details", {}, element("summary", {}, `The other ${rest.length} devices, which need less`), element("div", { class: "charts" }, ...rest)));
    }
    const parts = data.parts.filter((part) => data.memory.some((memory) => memory.parts.some(([name]) => name === part)));
    place.append(folded("Memory at the peak as a table", table("What each device holds at its peak", ["device", "#peak", "#of", "#at", ...parts.map((part) => `#${part}`)],
      data.memory.map((memory, i) => [data.devices[i].name, bytes(memory.peak_bytes), bytes(memory.capacity_bytes), seconds(memory.at_s),
        ...parts.map((part) => bytes((memory.parts.find(([name]) => name === part) ?? [part, 0])[1]))]))));
    panel.replaceChildren(...peakDetails(data.memory[order[0]], order[0]));
  }

  function memoryPicture(memory) {
    const wide = 240, high = 64, most = Math.max(memory.peak_bytes, Math.min(memory.capacity_bytes, memory.peak_bytes * 1.6)) || 1;
    const y = (size) => high - 2 - (high - 6) * size / most;
    const picture = drawn("svg", { viewBox: `0 0 ${wide} ${high}`, "aria-hidden": "true" });
    const steps = memory.curve.map((size, i) => `L${(wide * i) / memory.curve.length} ${y(size)}L${(wide * (i + 1)) / memory.curve.length} ${y(size)}`);
    picture.append(drawn("path", { class: "area", d: `M0 ${high - 2}${steps.join("")}L${wide} ${high - 2}Z` }));
    if (memory.capacity_bytes <= most) picture.append(drawn("line", { class: "limit", x1: 0, x2: wide, y1: y(memory.capacity_bytes), y2: y(memory.capacity_bytes) }));
    const x = data.makespan_s ? wide * memory.at_s / data.makespan_s : 0;
    picture.append(drawn("circle", { cx: Math.min(Math.max(x, 3), wide - 3), cy: y(memory.peak_bytes) + 0.5, r: 3, style: "fill: var(--mark)" }));
    return picture;
  }

  function peakDetails(memory, i) {
    const parts = [...memory.parts].sort((a, b) => b[1] - a[1]).map(([name, size]) => `${name} ${bytes(size)}`).join(", ");
    const largest = memory.largest.map((held) => `${held.name} (${held.kind}, ${bytes(held.size_bytes)})`).join("; ");
    return [element("p", {}, element("strong", {}, data.devices[i].name), `: ${bytes(memory.peak_bytes)} of ${bytes(memory.capacity_bytes)} at ${seconds(memory.at_s)}`),
      element("p", {}, parts || "nothing"), element("p", {}, largest ? `largest that come and go: ${largest}` : "")];
  }

  // -- the search -------------------------------------------------------------------------------------

  function showSearch() {
    const place = body("search"), found = data.finding;
    if (found === null) {
      place.append(element("p", {}, "The plan was not searched for: its strategy was given."));
      return;
    }
    const facts = [found.method, found.seed === null ? "" : `seed ${found.seed}`, found.proposals === null ? "" : `${found.proposals.toLocaleString("en")} proposals`,
      found.elapsed_s === null ? "" : seconds(found.elapsed_s), found.stop].filter((text) => text);
    place.append(element("p", {}, `${facts.join(", ")}. `, gapText(found)));
    if (found.curve.length) {
      place.append(element("div", { class: "two" }, curvePicture(found, 0, "seconds", seconds), curvePicture(found, 1, "proposals", count)));
      place.append(folded("The curve as a table", table("The best so far", ["#after", "#proposals", "#per iteration"],
        found.curve.map(([at, proposals, best]) => [seconds(at), proposals.toLocaleString("en"), seconds(best)]))));
    }
  }

  function gapText(found) {
    if (found.proved_among !== null) return `Proved: none is faster of the ${found.proved_among}.`;
    if (found.gap === null) return "How far from the optimum this is, is not known.";
    const more = found.gap < 1 ? `${percent(found.gap)} above` : `${(found.gap + 1).toFixed(1)} times`;
    return `It is at most ${more} the optimum (lower bound ${seconds(found.lower_bound_s)}) of ${found.bounded_among}.`;
  }

  function curvePicture(found, axis, name, text) {
    const wide = 560, high = 280, left = 62, bottom = 34, right = 96, top = 12;
    const last = Math.max(...found.curve.map((point) => point[axis]), axis === 0 ? found.elapsed_s ?? 0 : found.proposals ?? 0) || 1;
    const rivals = data.rivals.filter((rival) => rival.makespan_s <= 2.5 * found.curve[0][2]);
    const levels = [...found.curve.map((point) => point[2]), ...rivals.map((rival) => rival.makespan_s), ...(found.lower_bound_s ? [found.lower_bound_s] : [])];
    const low = Math.min(...levels) * 0.97, top_s = Math.max(...levels) * 1.02;
    const x = (value) => left + (wide - left - right) * value / last;
    const y = (value) => top + (high - top - bottom) * (1 - (value - low) / ((top_s - low) || 1));
    const picture = drawn("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", style: "max-width: 100%", "aria-label": `Best so far against ${name}` });
    for (let k = 0; k <= 4; k += 1) {
      const level = low + (top_s - low) * k / 4, at = last * k / 4;
      picture.append(drawn("line", { class: "axis", x1: left, x2: wide - right, y1: y(level), y2: y(level) }));
      picture.append(withText(drawn("text", { x: left - 6, y: y(level) + 4, "text-anchor": "end" }), seconds(level)));
      picture.append(withText(drawn("text", { x: x(at), y: high - bottom + 16, "text-anchor": "middle" }), k === 0 ? "0" : text(at)));
    }
    picture.append(withText(drawn("text", { x: (left + wide - right) / 2, y: high - 3, "text-anchor": "middle" }), name));
    const labels = [];
    const line = (kind, value, label) => {
      picture.append(drawn("line", { class: kind, x1: left, x2: wide - right, y1: y(value), y2: y(value) }));
      labels.push([y(value) + 4, label]);
    };
    for (const rival of rivals) line("rival", rival.makespan_s, rival.fits === false ? `${rival.name} (too large)` : rival.name);
    if (found.lower_bound_s) line("bound", found.lower_bound_s, "lower bound");
    labels.sort((a, b) => a[0] - b[0]);
    labels.forEach(([at, label], i) => {
      if (i > 0) labels[i][0] = at = Math.max(at, labels[i - 1][0] + 12);
      picture.append(withText(drawn("text", { x: wide - right + 4, y: at }), label));
    });
    let path = "";
    found.curve.forEach((point, i) => {
      path += i === 0 ? `M${x(point[axis])} ${y(point[2])}` : `H${x(point[axis])}V${y(point[2])}`;
    });
    picture.append(drawn("path", { class: "curve", d: `${path}H${x(last)}` }));
    return element("figure", { style: "margin: 0" }, picture);
  }

  // ---------------------------------------------------------------------------------------------------

  showVerdict();
  showStrategy();
  const chart = showTimeline();
  showTime();
  showBytes();
  showMemory();
  showSearch();
  document.documentElement.dataset.ready = "true";
  window.soapstone = { chart };
})();
