// Words in memory that processes share: counters that one adds to and another waits for.
//
// Addresses are of aligned 32-bit words in shared mappings, which the caller keeps mapped. What was written
// before a word was added to is seen by whoever has loaded the new value.

#include <nanobind/nanobind.h>
#include <time.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

#include "module.h"

namespace nb = nanobind;

namespace soapstone {
namespace {

using Word = std::uint32_t;

std::atomic_ref<Word> At(std::uintptr_t address) {
  return std::atomic_ref<Word>(*reinterpret_cast<Word*>(address));
}

#if defined(__linux__)
void Wake(std::uintptr_t address) { syscall(SYS_futex, address, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

void Sleep(std::uintptr_t address, Word seen, timespec longest) {
  syscall(SYS_futex, address, FUTEX_WAIT, seen, &longest, nullptr, 0);
}
#else
void Wake(std::uintptr_t) {}

void Sleep(std::uintptr_t, Word, timespec) {
  const timespec moment = {0, 50000};
  nanosleep(&moment, nullptr);
}
#endif

Word Load(std::uintptr_t address) { return At(address).load(std::memory_order_acquire); }

// Adds to a word; the new value.
Word Add(std::uintptr_t address, std::int32_t difference) {
  const Word added = static_cast<Word>(difference);
  return At(address).fetch_add(added, std::memory_order_acq_rel) + added;
}

// Adds one to a word, and wakes those who sleep until it changes; the next word says how many do.
void Ring(std::uintptr_t address) {
  At(address).fetch_add(1, std::memory_order_seq_cst);
  if (At(address + sizeof(Word)).load(std::memory_order_seq_cst) != 0) Wake(address);
}

void Relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

// One more who sleeps, as long as this lives.
class Asleep {
 public:
  explicit Asleep(std::uintptr_t address) : count_(At(address)) { count_.fetch_add(1, std::memory_order_seq_cst); }
  ~Asleep() { count_.fetch_sub(1, std::memory_order_seq_cst); }
  Asleep(const Asleep&) = delete;
  Asleep& operator=(const Asleep&) = delete;

 private:
  std::atomic_ref<Word> count_;
};

// Waits until a word is no longer what it was: watching it for a while, then asleep, as the next word says.
// False if it is still the same after the time given.
bool Wait(std::uintptr_t address, Word seen, double watch_s, double timeout_s) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  const auto watched = start + std::chrono::duration<double>(watch_s);
  while (Clock::now() < watched) {
    for (int i = 0; i < 32; ++i) {
      if (Load(address) != seen) return true;
      Relax();
    }
  }
  const auto end = start + std::chrono::duration<double>(timeout_s);
  const Asleep asleep(address + sizeof(Word));
  while (At(address).load(std::memory_order_seq_cst) == seen) {
    const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(end - Clock::now()).count();
    if (left <= 0) return false;
    Sleep(address, seen, {static_cast<time_t>(left / 1000000000), static_cast<long>(left % 1000000000)});
  }
  return true;
}

}  // namespace

void BindWords(nb::module_& module) {
  module.def("word_load", &Load, nb::arg("address"));
  module.def("word_add", &Add, nb::arg("address"), nb::arg("difference"));
  module.def("word_ring", &Ring, nb::arg("address"));
  module.def("word_wait", &Wait, nb::arg("address"), nb::arg("seen"), nb::arg("watch_s"),
             nb::arg("timeout_s"), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace soapstone
