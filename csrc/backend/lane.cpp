#include "backend/lane.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <memory>

#include "backend/address.h"

namespace kvxfer {

namespace {

constexpr std::uint32_t hello_magic = 0x4658564b;  // "KVXF"
constexpr std::size_t token_size = 32;
constexpr std::size_t max_pending = 64;
constexpr std::size_t max_clients = 64;
constexpr Nanoseconds hello_patience = 2'000'000'000;
constexpr Nanoseconds resolve_patience = 5'000'000'000;  // with the name of an own address

// What each side says first, after the token. The listener answers every lane with its own.
struct Hello {
  std::uint32_t magic = hello_magic;
  std::uint16_t protocol = lane_protocol;
  std::uint16_t lane = 0;
  std::uint16_t lanes = 0;
  std::uint16_t reserved = 0;
  std::uint32_t reserved2 = 0;
  std::uint64_t client = 0;  // random: tells the lanes of one client from another's
};
static_assert(sizeof(Hello) == 24);
static_assert(std::endian::native == std::endian::little, "the wire carries structs as they lie in memory");

Error lost(const std::string& what) { return Error(Fault::peer_lost, what); }

Error other_protocol(std::uint16_t theirs) {
  return Error(Fault::usage, "the peer's data connection speaks protocol " + std::to_string(theirs) + ", this side " +
                                 std::to_string(lane_protocol) + "; install the same kvxfer on both");
}

std::pair<std::string, std::string> split_endpoint(const std::string& endpoint) {
  const std::size_t colon = endpoint.rfind(':');
  std::uint16_t port = 0;
  const char* end = endpoint.data() + endpoint.size();
  if (colon == std::string::npos || colon == 0 || std::from_chars(endpoint.data() + colon + 1, end, port).ptr != end ||
      port == 0)
    throw Error(Fault::usage, "'" + endpoint + "' is no endpoint; host:port is");
  std::string host = endpoint.substr(0, colon);
  if (host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  return {host, std::to_string(port)};
}

std::uint64_t random_number() {
  std::uint64_t number = 0;
  if (::getrandom(&number, sizeof number, 0) != sizeof number)
    throw system_error(Fault::unavailable, "no random number", errno);
  return number;
}

std::string hexadecimal(std::uint64_t number) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(number));
  return text.data();
}

void set_blocking(int fd, bool blocking) {
  const int flags = ::fcntl(fd, F_GETFL);
  ::fcntl(fd, F_SETFL, blocking ? flags & ~O_NONBLOCK : flags | O_NONBLOCK);
}

void set_no_delay(int fd) {
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

Socket listening_socket(const Address& local, const std::string& name) {
  Socket socket(::socket(local.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.open()) throw system_error(Fault::unavailable, "no socket", errno);
  const int on = 1;
  ::setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::bind(socket.fd(), local.get(), local.length) != 0 || ::listen(socket.fd(), SOMAXCONN) != 0)
    throw system_error(Fault::unavailable, "cannot listen on " + name, errno);
  return socket;
}

std::string endpoint_of(int fd) {
  Address local;
  local.length = sizeof local.storage;
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&local.storage), &local.length);
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  ::getnameinfo(local.get(), local.length, host.data(), host.size(), port.data(), port.size(),
                NI_NUMERICHOST | NI_NUMERICSERV);
  const std::string name = host.data();
  return (local.storage.ss_family == AF_INET6 ? "[" + name + "]" : name) + ":" + port.data();
}

// Takes as long for a wrong token as for a right one.
bool same_token(const char* a, const std::string& b) {
  unsigned difference = b.size() == token_size ? 0 : 1;
  for (std::size_t i = 0; i < token_size && i < b.size(); ++i) difference |= static_cast<unsigned>(a[i] ^ b[i]) & 0xffU;
  return difference == 0;
}

// Room for the control message that carries one descriptor.
struct OneDescriptor {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> bytes{};

  void put(int descriptor, msghdr& message) {
    message.msg_control = bytes.data();
    message.msg_controllen = bytes.size();
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof descriptor);
    std::memcpy(CMSG_DATA(head), &descriptor, sizeof descriptor);
  }
  void offer(msghdr& message) {
    message.msg_control = bytes.data();
    message.msg_controllen = CMSG_LEN(sizeof(int));  // not one byte more, or the kernel takes that for a second one
  }
  // Closed with the socket that is returned; not open when none came.
  static Socket take(msghdr& message) {
    const cmsghdr* head = CMSG_FIRSTHDR(&message);
    if (head == nullptr || head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS ||
        head->cmsg_len != CMSG_LEN(sizeof(int)))
      return {};
    int descriptor = -1;
    std::memcpy(&descriptor, CMSG_DATA(head), sizeof descriptor);
    return Socket(descriptor);
  }
};

}  // namespace

int wait_for(int fd, short events, Deadline deadline, int interrupt) {
  for (;;) {
    pollfd entries[2] = {{fd, events, 0}, {interrupt, POLLIN, 0}};
    const int ready = ::poll(entries, 2, deadline.milliseconds_left());
    if (ready > 0) return entries[1].revents != 0 ? ECANCELED : 0;
    if (ready < 0 && errno != EINTR) return errno;
    if (ready == 0 && deadline.passed()) return ETIMEDOUT;
  }
}

std::size_t advance(iovec* vectors, std::size_t count, std::size_t done) {
  std::size_t used = 0;
  while (used < count && done >= vectors[used].iov_len) done -= vectors[used++].iov_len;
  if (used < count) {
    vectors[used].iov_base = static_cast<char*>(vectors[used].iov_base) + done;
    vectors[used].iov_len -= done;
  }
  return used;
}

Socket::~Socket() {
  if (fd_ >= 0) ::close(fd_);
}

void Socket::shut() const {
  if (fd_ >= 0) ::shutdown(fd_, SHUT_RDWR);
}

int send_vectors(int fd, iovec* vectors, std::size_t count, int descriptor) {
  return all_vectors(vectors, count, [fd, &descriptor](iovec* from, std::size_t n) {
    msghdr message{};
    message.msg_iov = from;
    message.msg_iovlen = n;
    OneDescriptor room;
    if (descriptor >= 0) room.put(descriptor, message);
    const ssize_t sent = ::sendmsg(fd, &message, MSG_NOSIGNAL);
    if (sent > 0) descriptor = -1;  // it has gone with these bytes
    return sent;
  });
}

int receive_vectors(int fd, iovec* vectors, std::size_t count) {
  return all_vectors(vectors, count, [fd](iovec* into, std::size_t n) {
    msghdr message{};
    message.msg_iov = into;
    message.msg_iovlen = n;
    return ::recvmsg(fd, &message, 0);
  });
}

int receive_with_descriptor(int fd, void* data, std::size_t bytes, Socket& into) {
  into = Socket();
  iovec vector{data, bytes};
  return all_vectors(&vector, 1, [fd, &into](iovec* to, std::size_t n) {
    msghdr message{};
    message.msg_iov = to;
    message.msg_iovlen = n;
    OneDescriptor room;
    room.offer(message);
    const ssize_t got = ::recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
    if (got > 0)
      if (Socket came = OneDescriptor::take(message); came.open() && !into.open()) into = std::move(came);
    return got;
  });
}

int receive_until(int fd, void* data, std::size_t bytes, Deadline deadline, int interrupt) {
  auto* at = static_cast<char*>(data);
  while (bytes > 0) {
    if (const int code = wait_for(fd, POLLIN, deadline, interrupt)) return code;
    const ssize_t got = ::recv(fd, at, bytes, MSG_DONTWAIT);
    if (got == 0) return ECONNRESET;
    if (got < 0) {
      if (errno == EINTR || errno == EAGAIN) continue;
      return errno;
    }
    at += got;
    bytes -= static_cast<std::size_t>(got);
  }
  return 0;
}

int send_all(int fd, const void* data, std::size_t bytes) {
  iovec vector{const_cast<void*>(data), bytes};
  return send_vectors(fd, &vector, 1);
}

int receive_all(int fd, void* data, std::size_t bytes) {
  iovec vector{data, bytes};
  return receive_vectors(fd, &vector, 1);
}

// A connection that has not said who it is yet. Its room is fixed, so strangers cost no memory beyond it.
struct LaneListener::Pending {
  Socket socket;
  Nanoseconds give_up_at = 0;
  std::array<char, token_size + sizeof(Hello)> said{};
  std::size_t got = 0;

  // Reads what has come, and at most the token until that is right. False: drop the connection.
  bool read(const std::string& token) {
    while (!complete()) {
      const std::size_t wanted = got < token_size ? token_size : said.size();
      const ssize_t n = ::recv(socket.fd(), said.data() + got, wanted - got, MSG_DONTWAIT);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return errno == EAGAIN;
      if (n == 0) return false;
      got += static_cast<std::size_t>(n);
      if (got == token_size && !same_token(said.data(), token)) return false;
    }
    return true;
  }
  bool complete() const { return got == said.size(); }
  Hello hello() const {
    Hello hello;
    std::memcpy(&hello, said.data() + token_size, sizeof hello);
    return hello;
  }
};

// One that knew the token, and the lanes it has opened so far.
struct LaneListener::Client {
  std::uint64_t id = 0;
  Nanoseconds give_up_at = 0;
  std::size_t missing = 0;
  std::vector<Socket> lanes;
};

LaneListener::LaneListener(const std::string& address, std::uint16_t port, std::string token)
    : token_(std::move(token)) {
  const Address local =
      resolve(address, std::to_string(port), true, Fault::unavailable, Deadline::after(resolve_patience)).front();
  socket_ = listening_socket(local, address + " port " + std::to_string(port));
  endpoint_ = endpoint_of(socket_.fd());
  prepare_wake();
}

LaneListener::LaneListener(std::string token) : token_(std::move(token)) {
  endpoint_ = std::string(local_scheme) + "@kvxfer-";
  for (int word = 0; word < 2; ++word) endpoint_ += hexadecimal(random_number());
  socket_ = listening_socket(local_address(endpoint_), endpoint_);
  prepare_wake();
}

void LaneListener::prepare_wake() {
  wake_ = Socket(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_.open()) throw system_error(Fault::unavailable, "no event descriptor (eventfd)", errno);
}

void LaneListener::interrupt() const {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_.fd(), &one, sizeof one);
}

LaneListener::~LaneListener() = default;

void LaneListener::take_connection() {
  Socket fresh(::accept4(socket_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fresh.open()) {
    if (errno != EMFILE && errno != ENFILE) return;  // the connection is gone again
    if (pending_.empty()) throw system_error(Fault::unavailable, "cannot accept the peer's data connections", errno);
    pending_.erase(pending_.begin());
    return;
  }
  set_no_delay(fresh.fd());
  if (pending_.size() == max_pending) pending_.erase(pending_.begin());  // the oldest silent one makes room
  pending_.push_back({std::move(fresh), now_ns() + hello_patience});
}

void LaneListener::read_pending() {
  for (std::size_t i = 0; i < pending_.size();) {
    const bool keep = pending_[i].read(token_) && now_ns() < pending_[i].give_up_at;
    if (keep && !pending_[i].complete()) {
      ++i;
      continue;
    }
    Pending done = std::move(pending_[i]);
    pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
    if (keep) admit(done);
  }
}

void LaneListener::admit(Pending& one) {
  const Hello hello = one.hello();
  if (hello.magic != hello_magic) return;
  const Hello mine;
  if (send_all(one.socket.fd(), &mine, sizeof mine) != 0) return;
  if (hello.protocol != lane_protocol) throw other_protocol(hello.protocol);
  if (hello.lanes == 0 || hello.lanes > max_lanes || hello.lane >= hello.lanes) return;

  auto client = std::find_if(clients_.begin(), clients_.end(), [&](const Client& c) { return c.id == hello.client; });
  if (client == clients_.end()) {
    if (clients_.size() == max_clients) clients_.erase(clients_.begin());
    client = clients_.insert(clients_.end(), {hello.client, 0, hello.lanes, std::vector<Socket>(hello.lanes)});
  }
  if (hello.lanes != client->lanes.size() || client->lanes[hello.lane].open()) return;
  set_blocking(one.socket.fd(), true);
  client->lanes[hello.lane] = std::move(one.socket);
  client->give_up_at = now_ns() + hello_patience;
  --client->missing;
}

// Empty when no client has opened all of its lanes; forgets those that stopped halfway.
std::vector<Socket> LaneListener::take_complete_client() {
  const Nanoseconds now = now_ns();
  std::erase_if(clients_, [now](const Client& c) { return c.missing > 0 && now >= c.give_up_at; });
  const auto done = std::find_if(clients_.begin(), clients_.end(), [](const Client& c) { return c.missing == 0; });
  if (done == clients_.end()) return {};
  std::vector<Socket> lanes = std::move(done->lanes);
  clients_.erase(done);
  return lanes;
}

std::vector<Socket> LaneListener::accept(Deadline deadline) {
  for (bool last_look = false;; last_look = deadline.passed()) {
    if (std::vector<Socket> lanes = take_complete_client(); !lanes.empty()) return lanes;
    if (last_look) throw lost("the peer opened no data connection in time");

    std::vector<pollfd> watched{{socket_.fd(), POLLIN, 0}, {wake_.fd(), POLLIN, 0}};
    for (const Pending& one : pending_) watched.push_back({one.socket.fd(), POLLIN, 0});
    // Half a second at most, so that the patience with a silent connection ends in time.
    if (::poll(watched.data(), watched.size(), deadline.milliseconds_left(500)) < 0) {
      if (errno != EINTR) throw system_error(Fault::unexpected, "poll", errno);
      continue;
    }
    if (watched[1].revents != 0) throw lost("waiting for the peer's data connections was interrupted");
    if (watched[0].revents != 0) take_connection();
    read_pending();
  }
}

namespace {

// 0 and an open socket, or the error code.
int connect_socket(const Address& address, Deadline deadline, int interrupt, Socket& into) {
  Socket socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.open()) return errno;
  int code = ::connect(socket.fd(), address.get(), address.length) == 0 ? 0 : errno;
  // A Unix listener whose queue is full: there is nothing to wait on.
  for (; code == EAGAIN && !deadline.passed();
       code = ::connect(socket.fd(), address.get(), address.length) == 0 ? 0 : errno) {
    pollfd stop{interrupt, POLLIN, 0};
    if (::poll(&stop, 1, 1) > 0) return ECANCELED;
  }
  if (code == EINPROGRESS || code == EINTR) {
    code = wait_for(socket.fd(), POLLOUT, deadline, interrupt);
    if (code == 0) {
      socklen_t length = sizeof code;
      ::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &code, &length);
    }
  }
  if (code != 0) return code;
  set_blocking(socket.fd(), true);
  set_no_delay(socket.fd());
  into = std::move(socket);
  return 0;
}

// A name may have several addresses (localhost has ::1 too) of which only some are listened on.
Socket connect_any(const std::vector<Address>& addresses, const std::string& endpoint, Deadline deadline,
                   int interrupt) {
  int first_code = 0;
  for (const Address& address : addresses) {
    Socket socket;
    const int code = connect_socket(address, deadline, interrupt, socket);
    if (code == 0) return socket;
    if (first_code == 0) first_code = code;
  }
  throw system_error(Fault::peer_lost, "cannot connect to the peer's data port at " + endpoint, first_code);
}

std::vector<Address> addresses_of(const std::string& endpoint, Deadline deadline, int interrupt) {
  if (is_local(endpoint)) return {local_address(endpoint)};
  const auto [host, port] = split_endpoint(endpoint);
  return resolve(host, port, false, Fault::peer_lost, deadline, interrupt);
}

}  // namespace

bool is_local(const std::string& endpoint) { return endpoint.starts_with(local_scheme); }

std::vector<Socket> connect_lanes(const std::string& endpoint, const std::string& token, std::uint16_t count,
                                  Deadline deadline, int interrupt) {
  const std::vector<Address> addresses = addresses_of(endpoint, deadline, interrupt);
  const std::uint64_t client = random_number();
  std::vector<Socket> lanes;
  for (std::uint16_t lane = 0; lane < count; ++lane) {
    lanes.push_back(connect_any(addresses, endpoint, deadline, interrupt));
    Hello hello;
    hello.lane = lane;
    hello.lanes = count;
    hello.client = client;
    std::string first = token;
    first.append(reinterpret_cast<const char*>(&hello), sizeof hello);
    if (const int code = send_all(lanes.back().fd(), first.data(), first.size()))
      throw system_error(Fault::peer_lost, "the peer at " + endpoint + " dropped the data connection", code);
  }
  for (const Socket& lane : lanes) {
    Hello theirs;
    if (const int code = receive_until(lane.fd(), &theirs, sizeof theirs, deadline, interrupt))
      throw system_error(Fault::peer_lost, "the peer at " + endpoint + " did not accept the data connection", code);
    if (theirs.magic != hello_magic)
      throw Error(Fault::usage, "what listens at " + endpoint + " is no kvxfer data port");
    if (theirs.protocol != lane_protocol) throw other_protocol(theirs.protocol);
  }
  return lanes;
}

std::string interface_of(int fd) {
  Address local, remote;
  local.length = remote.length = sizeof local.storage;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&local.storage), &local.length) != 0 ||
      ::getpeername(fd, reinterpret_cast<sockaddr*>(&remote.storage), &remote.length) != 0)
    return "unknown";
  const auto same_host = [](const sockaddr* a, const sockaddr* b) {
    if (a == nullptr || a->sa_family != b->sa_family) return false;
    if (a->sa_family == AF_INET)
      return reinterpret_cast<const sockaddr_in*>(a)->sin_addr.s_addr ==
             reinterpret_cast<const sockaddr_in*>(b)->sin_addr.s_addr;
    return a->sa_family == AF_INET6 && std::memcmp(&reinterpret_cast<const sockaddr_in6*>(a)->sin6_addr,
                                                   &reinterpret_cast<const sockaddr_in6*>(b)->sin6_addr, 16) == 0;
  };
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return "unknown";
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(all, ::freeifaddrs);
  const char* carrier = nullptr;
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    // The kernel sends to any of its own addresses over lo, whichever interface has it.
    if (same_host(one->ifa_addr, remote.get())) return "lo";
    if (same_host(one->ifa_addr, local.get())) carrier = one->ifa_name;
  }
  // 127.0.0.2 and its like belong to lo without being listed.
  if (carrier == nullptr && remote.storage.ss_family == AF_INET &&
      (ntohl(reinterpret_cast<const sockaddr_in*>(&remote.storage)->sin_addr.s_addr) >> 24) == 127)
    return "lo";
  return carrier != nullptr ? carrier : "unknown";
}

}  // namespace kvxfer
