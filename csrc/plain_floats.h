// Rounding to the nearest with subnormal numbers, whatever the thread is set to (PyTorch can be told to
// flush them): a vector's bits must not depend on the threads that take part.
#pragma once

#include <cfenv>

class PlainFloats {
 public:
  PlainFloats() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~PlainFloats() { std::fesetenv(&before_); }
  PlainFloats(const PlainFloats&) = delete;
  PlainFloats& operator=(const PlainFloats&) = delete;

 private:
  std::fenv_t before_;
};
