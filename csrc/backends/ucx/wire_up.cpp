#include "backends/ucx/wire_up.h"

#include <ifaddrs.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

#include "backend/error.h"
#include "backend/lane_peer.h"

namespace kvxfer::ucx {

namespace {

namespace fs = std::filesystem;

bool is_loopback(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET6)
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
  return (ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24) == 127;
}

// The interface that has the addresses of an RDMA device: of its port (RoCE), or of the same card (InfiniBand).
std::string interface_of_device(const fs::path& device) {
  std::error_code code;
  for (const auto& port : fs::directory_iterator(device / "ports", code)) {
    std::ifstream file(port.path() / "gid_attrs" / "ndevs" / "0");
    std::string name;
    if (file >> name) return name;
  }
  for (const auto& entry : fs::directory_iterator(device / "device" / "net", code)) return entry.path().filename();
  return {};
}

using Interfaces = std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)>;

// A list, one entry for each address; empty when the kernel does not tell.
Interfaces interfaces() {
  ifaddrs* all = nullptr;
  return {::getifaddrs(&all) == 0 ? all : nullptr, ::freeifaddrs};
}

std::optional<sockaddr_storage> address_of(const std::string& interface) {
  const Interfaces all = interfaces();
  for (const ifaddrs* one = all.get(); one != nullptr; one = one->ifa_next)
    if (interface == one->ifa_name && one->ifa_addr != nullptr && one->ifa_addr->sa_family == AF_INET) {
      sockaddr_storage found{};
      std::memcpy(&found, one->ifa_addr, sizeof(sockaddr_in));
      return found;
    }
  return std::nullopt;
}

// The interface that has this IPv6 address; nothing when none has.
std::string interface_with(const in6_addr& address) {
  const Interfaces all = interfaces();
  for (const ifaddrs* one = all.get(); one != nullptr; one = one->ifa_next)
    if (one->ifa_addr != nullptr && one->ifa_addr->sa_family == AF_INET6 &&
        IN6_ARE_ADDR_EQUAL(&reinterpret_cast<const sockaddr_in6*>(one->ifa_addr)->sin6_addr, &address))
      return one->ifa_name;
  return {};
}

// A socket of IPv6 that speaks IPv4 names its addresses as ::ffff:a.b.c.d, by which UCX knows no interface.
sockaddr_storage plain(const sockaddr_storage& address) {
  const auto& six = reinterpret_cast<const sockaddr_in6&>(address);
  if (address.ss_family != AF_INET6 || !IN6_IS_ADDR_V4MAPPED(&six.sin6_addr)) return address;
  sockaddr_in four{};
  four.sin_family = AF_INET;
  four.sin_port = six.sin6_port;
  std::memcpy(&four.sin_addr, six.sin6_addr.s6_addr + 12, sizeof four.sin_addr);
  sockaddr_storage storage{};
  std::memcpy(&storage, &four, sizeof four);
  return storage;
}

// UCX_NET_DEVICES: names of devices (mlx5_0) or of their ports (mlx5_0:1); after ^ those that are not to be used.
bool allows(const std::string& list, const std::string& device) {
  const bool excepted = list.starts_with('^');
  std::istringstream entries(excepted ? list.substr(1) : list);
  for (std::string entry; std::getline(entries, entry, ',');) {
    const std::string name = entry.substr(0, entry.find(':'));
    if (name == "all" || name == device) return !excepted;
  }
  return excepted;
}

// Of the first RDMA device that UCX may use and that has one.
std::optional<sockaddr_storage> rdma_address() {
  const char* allowed = std::getenv("UCX_NET_DEVICES");
  std::error_code code;
  for (const auto& device : fs::directory_iterator("/sys/class/infiniband", code)) {
    const std::string name = device.path().filename();
    if (allowed != nullptr && !allows(allowed, name)) continue;
    if (const auto found = address_of(interface_of_device(device.path()))) return found;
  }
  return std::nullopt;
}

}  // namespace

void require_family_of_tcp(const sockaddr_storage& lane) {
  if (lane.ss_family != AF_INET6) return;
  const char* order = std::getenv("UCX_TCP_AF_PRIO");
  if (order != nullptr && std::string_view(order).starts_with("inet6")) return;
  const std::string interface = interface_with(reinterpret_cast<const sockaddr_in6&>(lane).sin6_addr);
  if (!address_of(interface)) return;
  throw Error(Fault::unavailable, "the peer is reached by IPv6, and of " + interface +
                                      ", which has both, UCX takes the IPv4 address: set UCX_TCP_AF_PRIO=inet6,inet "
                                      "on both sides, or name the peer by its IPv4 address");
}

sockaddr_storage Answer::choose_host(const sockaddr_storage& lane, bool rdma) {
  if (!rdma || !is_loopback(lane)) return lane;
  const auto found = rdma_address();
  if (!found) return lane;
  family = 4;
  std::memcpy(address.data(), &reinterpret_cast<const sockaddr_in&>(*found).sin_addr, 4);
  return *found;
}

sockaddr_storage Answer::host_or(const sockaddr_storage& lane) const {
  if (family != 4) return lane;
  sockaddr_in host{};
  host.sin_family = AF_INET;
  std::memcpy(&host.sin_addr, address.data(), 4);
  sockaddr_storage storage{};
  std::memcpy(&storage, &host, sizeof host);
  return storage;
}

sockaddr_storage with_port(const sockaddr_storage& host, std::uint16_t port) {
  sockaddr_storage address = host;
  if (host.ss_family == AF_INET6)
    reinterpret_cast<sockaddr_in6&>(address).sin6_port = htons(port);
  else
    reinterpret_cast<sockaddr_in&>(address).sin_port = htons(port);
  return address;
}

sockaddr_storage self_of(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  return plain(address);
}

sockaddr_storage peer_of(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  ::getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length);
  return plain(address);
}

std::uint64_t random_id() {
  std::uint64_t number = 0;
  if (::getrandom(&number, sizeof number, 0) != sizeof number)
    throw system_error(Fault::unavailable, "no random number", errno);
  return number;
}

bool said_ready(int fd) {
  char byte = 0;
  const ssize_t got = ::recv(fd, &byte, 1, MSG_DONTWAIT);
  if (got == 1 && byte == ready_byte) return true;
  if (got == 1) throw Error(Fault::peer_lost, "the peer gave up UCX's wire-up");  // it says farewell, or nonsense
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  throw Error(Fault::peer_lost, "the peer was lost: " + closed_or(got == 0 ? ECONNRESET : errno));
}

}  // namespace kvxfer::ucx
