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

// Adds to a word, and wakes whoever waits for it to change; the new value.
Word Add(std::uintptr_t address, std::int32_t difference) {
  const Word now = At(address).fetch_add(static_cast<Word>(difference), std::memory_order_seq_cst) +
                   static_cast<Word>(difference);
  Wake(address);
  return now;
}

void Relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

// Waits until a word is no longer what it was: watching it for a while, then asleep. False if it never was
// in the time given.
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
  while (Load(address) == seen) {
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
  module.def("word_wait", &Wait, nb::arg("address"), nb::arg("seen"), nb::arg("watch_s"),
             nb::arg("timeout_s"), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace soapstone
