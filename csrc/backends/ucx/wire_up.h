// What both sides say on lane 0 before UCX can carry anything: how many endpoints, where the listener's are, and by
// which numbers it tells them from strangers. Only a peer that knew the token hears those.
#pragma once

#include <netinet/in.h>

#include <array>
#include <cstdint>

#include "backends/ucx/endpoint.h"

namespace kvxfer::ucx {

inline constexpr std::uint32_t most_endpoints = 64;

// From the side that connects; what it says holds for both.
struct Offer {
  std::uint32_t magic = 0x4f58564b;  // "KVXO"
  std::uint32_t endpoints = 1;
  Errors errors = Errors::peer;
  std::uint8_t reserved[7] = {};
};
static_assert(sizeof(Offer) == 16);

// From the side that listens; as many EndpointAddress follow as were asked for.
struct Answer {
  std::uint32_t magic = 0x4158564b;  // "KVXA"
  std::uint32_t family = 0;          // 4 or 6: at `address`; 0: where lane 0 was connected to
  std::array<std::uint8_t, 16> address{};

  // Where to listen, for a lane that came in at `lane`: there, unless that is loopback and an RDMA device has an
  // address.
  sockaddr_storage choose_host(const sockaddr_storage& lane, bool rdma);
  sockaddr_storage host_or(const sockaddr_storage& lane) const;
};
static_assert(sizeof(Answer) == 24);

struct EndpointAddress {
  std::uint64_t client_id = 0;
  std::uint16_t port = 0;
  std::uint8_t reserved[6] = {};
};
static_assert(sizeof(EndpointAddress) == 16);

// Where UCX speaks TCP. Of an interface with both it takes one address only, the IPv4 one unless UCX_TCP_AF_PRIO says
// otherwise, and it ends the process when a connection comes by the other. Throws Error(unavailable) before that.
void require_family_of_tcp(const sockaddr_storage& lane);
sockaddr_storage with_port(const sockaddr_storage& host, std::uint16_t port);
sockaddr_storage self_of(int fd);  // both as plain IPv4 where they are that
sockaddr_storage peer_of(int fd);
std::uint64_t random_id();
inline constexpr char ready_byte = 1;  // that each side says once it needs no more connections, the listener last
// Whether it has come. Throws Error(peer_lost) when the socket is closed, or something else came.
bool said_ready(int fd);

}  // namespace kvxfer::ucx
