#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>

namespace oomb {

// Base of everything this library throws; the bindings turn it into oomb.Error.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A caller's mistake: "<argument>: expected <what>, got <value>". Becomes ValueError.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

// Memory that is not to be had; the text says what was needed, what is free and which setting to
// change. Becomes oomb.OutOfMemoryError.
class OutOfMemory : public Error {
 public:
  OutOfMemory(const std::string& message, int64_t needed_bytes, int64_t available_bytes)
      : Error(message), needed_bytes_(needed_bytes), available_bytes_(available_bytes) {}

  int64_t needed_bytes() const { return needed_bytes_; }
  int64_t available_bytes() const { return available_bytes_; }

 private:
  int64_t needed_bytes_;
  int64_t available_bytes_;
};

// A failed CUDA runtime or driver call.
class CudaError : public Error {
 public:
  using Error::Error;
};

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

// What concat() would write, written only where a text is wanted: checks that hold cost nothing. To
// be used up in the expression that makes it.
template <typename... Values>
class Parts {
 public:
  explicit Parts(const Values&... values) : values_(values...) {}
  friend std::ostream& operator<<(std::ostream& stream, const Parts& parts) {
    std::apply([&](const auto&... values) { (stream << ... << values); }, parts.values_);
    return stream;
  }

 private:
  std::tuple<const Values&...> values_;
};

// Checks an argument of the public surface.
template <typename Expected, typename Got>
void expect(bool ok, const char* argument, const Expected& expected, const Got& got) {
  if (!ok) throw InvalidArgument(concat(argument, ": expected ", expected, ", got ", got));
}

}  // namespace oomb
