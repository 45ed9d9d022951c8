// What can go wrong, as the exit status it deserves. Thrown only outside the data path; there, errors travel as events.
#pragma once

#include <stdexcept>
#include <string>

namespace kvxfer {

// The values are the exit statuses of kvxfer/errors.py.
enum class Fault : int { unexpected = 1, usage = 2, unavailable = 3, wrong_bytes = 4, peer_lost = 5 };

class Error : public std::runtime_error {
 public:
  Error(Fault fault, const std::string& message) : std::runtime_error(message), fault_(fault) {}
  Fault fault() const { return fault_; }

 private:
  Fault fault_;
};

// "what: strerror(code)"
Error system_error(Fault fault, const std::string& what, int code);

}  // namespace kvxfer
