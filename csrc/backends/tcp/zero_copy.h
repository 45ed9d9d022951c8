// Sends that leave the bytes where they are (MSG_ZEROCOPY): the kernel hands the blocks themselves to the network card,
// and says on the connection's error queue when it needs them no more. Until then they must not change.
#pragma once

#include <sys/uio.h>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace kvxfer::tcp {

// What became of a connection's calls: the kernel numbers them from 0, in 32 bits that wrap.
struct DoneCalls {
  std::uint32_t first = 0;
  std::uint32_t last = 0;
  bool copied = false;  // after all, as within a host or where the card cannot gather
  std::uint32_t count() const { return last - first + 1; }
};

// How far a connection's calls are done. They are told of mostly, but not always, in order.
class Progress {
 public:
  void add(const DoneCalls& done);
  bool all_below(std::uint32_t call) const { return static_cast<std::int32_t>(call - below_) <= 0; }

 private:
  std::uint32_t below_ = 0;
  std::vector<DoneCalls> early_;
};

// How many calls the kernel took: as they are, and with a copy because it had no room to remember them.
struct Calls {
  std::uint32_t taken = 0;
  std::uint32_t refused = 0;
};

// Before the first call. Throws Error(unavailable) when the kernel refuses: it would copy, and say nothing later.
void allow_zero_copy(int fd);
// send_vectors that leaves the bytes where they are; adds to `calls`.
int send_in_place(int fd, iovec* vectors, std::size_t count, Calls& calls);
// The next news from the error queue; does not wait.
std::optional<DoneCalls> take_done(int fd);
// Ends a connection and forgets what it has not sent yet, so that nobody gets to see blocks that have changed since.
// The descriptor stays valid.
void abort_connection(int fd);

}  // namespace kvxfer::tcp
