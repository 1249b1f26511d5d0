// A scope in which float arithmetic is IEEE 754 as written: denormals kept, round to nearest even, no traps.
//
// A user (torch.set_flush_denormal) or a library may have set other modes for the thread; results must not depend on
// it. Modes are per thread and are restored at the end. Call the arithmetic through a function that is not inlined:
// compilers do not know that it depends on the control register.
#pragma once

#include <cstdint>

namespace zb {
namespace {  // internal linkage: included by sources with different instruction set flags

class IeeeScope {
 public:
  IeeeScope() noexcept : before_(read()) {
    if ((before_ & kControl) != kIeee) write(kIeee);
  }
  ~IeeeScope() {
    if ((before_ & kControl) != kIeee) write(before_);
  }
  IeeeScope(const IeeeScope&) = delete;
  IeeeScope& operator=(const IeeeScope&) = delete;

 private:
#if defined(__x86_64__)
  using Word = std::uint32_t;
  static constexpr Word kControl = 0xFFC0;  // the lower bits are sticky exception flags
  static constexpr Word kIeee = 0x1F80;     // MXCSR: all exceptions masked, nearest, neither FTZ nor DAZ
  static Word read() noexcept {
    Word word;
    __asm__ volatile("stmxcsr %0" : "=m"(word) : : "memory");
    return word;
  }
  static void write(Word word) noexcept { __asm__ volatile("ldmxcsr %0" : : "m"(word) : "memory"); }
#elif defined(__aarch64__)
  using Word = std::uint64_t;
  static constexpr Word kControl = ~Word{0};
  static constexpr Word kIeee = 0;  // FPCR: no traps, nearest, neither FZ, FZ16, DN nor AHP
  static Word read() noexcept {
    Word word;
    __asm__ volatile("mrs %0, fpcr" : "=r"(word) : : "memory");
    return word;
  }
  static void write(Word word) noexcept { __asm__ volatile("msr fpcr, %0" : : "r"(word) : "memory"); }
#else
#error "zerobench knows the float control register of x86-64 and AArch64 only"
#endif

  Word before_;
};

}  // namespace
}  // namespace zb
