// Where sockets lead, and the names that stand for it.
#pragma once

#include <sys/socket.h>

#include <string>
#include <string_view>
#include <vector>

#include "backend/clock.h"
#include "backend/error.h"

namespace kvxfer {

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

inline constexpr std::string_view local_scheme = "unix:";

// Of unix:@name: an abstract name, which begins with a zero byte and needs no file. Throws Error(usage).
Address local_address(const std::string& endpoint);

// At least one, of a name or a number. `passive`: to listen there. Throws Error(fault) when there is none, and when
// nobody answers until the deadline, or until the descriptor `interrupt` is readable.
std::vector<Address> resolve(const std::string& host, const std::string& port, bool passive, Fault fault,
                             Deadline deadline, int interrupt = -1);

}  // namespace kvxfer
