// Lanes: authenticated connections between two contexts, for backends that have no wire-up of their own: TCP, or on one
// host Unix sockets, which carry descriptors too.
//
// A client opens all lanes of a peer at once; several clients may do so at the same time. Each begins with the 32-byte
// token that both sides got over the control channel; the listener compares it before it reads, parses or allocates
// anything else, and drops the connection when it is wrong, late or cut. Then both sides say their protocol version.
// Integers on the wire are little-endian.
#pragma once

#include <sys/uio.h>
#include <cerrno>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "backend/clock.h"
#include "backend/error.h"

namespace kvxfer {

inline constexpr std::uint16_t lane_protocol = 1;
inline constexpr std::uint16_t max_lanes = 64;

// Owns a file descriptor.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket();
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int fd() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  // Ends both directions and wakes every thread that waits on the socket; the descriptor stays valid until destruction.
  void shut() const;

 private:
  int fd_ = -1;
};

// 0 when `fd` is ready for `events` (of poll), else an error code; ETIMEDOUT at the deadline, ECANCELED once
// `interrupt` is readable.
int wait_for(int fd, short events, Deadline deadline, int interrupt);
// Blocking transfers of whole buffers. 0, or the error code; a closed connection is ECONNRESET.
int send_all(int fd, const void* data, std::size_t bytes);
int receive_all(int fd, void* data, std::size_t bytes);
// Both consume `vectors` (entries are advanced). A descriptor goes with the first byte, over Unix sockets only.
int send_vectors(int fd, iovec* vectors, std::size_t count, int descriptor = -1);
int receive_vectors(int fd, iovec* vectors, std::size_t count);
// receive_all that ends at the deadline (ETIMEDOUT), or once `interrupt` is readable (ECANCELED); -1: there is none.
int receive_until(int fd, void* data, std::size_t bytes, Deadline deadline, int interrupt = -1);
// receive_all that keeps a descriptor which came along; what `into` held is closed. A second one is dropped.
int receive_with_descriptor(int fd, void* data, std::size_t bytes, Socket& into);
// Advances over the first `done` bytes; returns how many leading entries are used up, empty ones included.
std::size_t advance(iovec* vectors, std::size_t count, std::size_t done);
// Makes calls like sendmsg until all bytes have moved. 0, or the error code.
template <typename Call>
int all_vectors(iovec* vectors, std::size_t count, const Call& call) {
  std::size_t used = advance(vectors, count, 0);
  while (used < count) {
    const ssize_t done = call(vectors + used, count - used);
    if (done == 0) return ECONNRESET;
    if (done < 0) {
      if (errno == EINTR) continue;
      return errno;
    }
    used += advance(vectors + used, count - used, static_cast<std::size_t>(done));
  }
  return 0;
}

class LaneListener {
 public:
  // Throws Error(unavailable) when the address or port cannot be had.
  LaneListener(const std::string& address, std::uint16_t port, std::string token);
  // On an abstract Unix socket of a random name: for processes of this network namespace, and gone with the descriptor.
  explicit LaneListener(std::string token);
  ~LaneListener();
  // host:port, IPv6 addresses in brackets; unix:@name.
  std::string endpoint() const { return endpoint_; }
  // All lanes of the next client, in order; what other clients have opened by then stays for the next call. Throws
  // Error(peer_lost) at the deadline or when interrupted, Error(usage) when a client speaks another protocol version.
  std::vector<Socket> accept(Deadline deadline);
  // Ends accept(), now and from now on. From any thread.
  void interrupt() const;

 private:
  struct Pending;
  struct Client;

  void prepare_wake();
  void take_connection();
  void read_pending();
  void admit(Pending& one);
  std::vector<Socket> take_complete_client();

  Socket socket_;
  Socket wake_;  // an eventfd
  std::string token_;
  std::string endpoint_;
  std::vector<Pending> pending_;  // at most max_pending; a full hello makes it a lane of a client
  std::vector<Client> clients_;   // at most max_clients, in order of their first lane
};

// `count` lanes to one listener. Throws Error(peer_lost) when it cannot be reached or drops us, Error(usage) on another
// protocol version or a malformed endpoint. Gives up once the descriptor `interrupt` is readable; -1: there is none.
std::vector<Socket> connect_lanes(const std::string& endpoint, const std::string& token, std::uint16_t count,
                                  Deadline deadline, int interrupt = -1);

// Whether an endpoint is that of a Unix socket.
bool is_local(const std::string& endpoint);

// The interface that carries a TCP connection, "lo" when both ends are on this host.
std::string interface_of(int fd);

}  // namespace kvxfer
