#include "backends/tcp/tcp.h"

#include <sys/socket.h>

#include <cerrno>

#include "backend/lane_context.h"
#include "backends/tcp/peer.h"
#include "memory/parallel.h"

namespace kvxfer::tcp {

namespace {

constexpr OptionBounds connections{"connections", 1, max_lanes - 1, 2};
constexpr OptionBounds chunk_kib{"chunk_kib", 4, 1 << 20, 1024};
constexpr OptionBounds pieces_per_call{"pieces_per_call", 1, 1023, 64};
// Where there is a CPU for each connection and no more, the scheduler often leaves them all on one. With more CPUs than
// that, both ends of a connection may run at the same time, which pinning would forbid.
constexpr std::int64_t if_few_cpus = 2;
constexpr OptionBounds pin{"pin", 0, if_few_cpus, if_few_cpus};
constexpr OptionBounds reno_on_lo{"reno_on_lo", 0, 1, 1};
constexpr OptionBounds busy_poll_us{"busy_poll_us", 0, 10'000, 0};
constexpr OptionBounds zero_copy{"zerocopy", 0, 1, 0};

Capabilities abilities() {
  Capabilities c;
  c.max_inflight = max_inflight;
  c.push_confirmed_by = Confirms::target;
  return c;
}

// Now, and not when a peer connects.
void require_busy_poll(int for_us) {
  const Socket tried(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::setsockopt(tried.fd(), SOL_SOCKET, SO_BUSY_POLL, &for_us, sizeof for_us) == 0) return;
  throw system_error(Fault::unavailable,
                     "the kernel refuses busy_poll_us=" + std::to_string(for_us) +
                         " (it takes CAP_NET_ADMIN, or as much in sysctl net.core.busy_read)",
                     errno);
}

bool pins(const Options& options) {
  const std::int64_t asked = option(options, pin);
  if (asked != if_few_cpus) return asked != 0;
  return usable_cores() <= static_cast<std::size_t>(option(options, connections));
}

class TcpContext final : public LaneContext {
 public:
  TcpContext(const Token& token, const Options& options)
      : LaneContext(abilities(), token, static_cast<std::uint16_t>(1 + option(options, connections))),
        tuning_{static_cast<std::uint64_t>(option(options, chunk_kib)) << 10,
                static_cast<std::size_t>(option(options, pieces_per_call)),
                pins(options),
                option(options, reno_on_lo) != 0,
                static_cast<int>(option(options, busy_poll_us)),
                option(options, zero_copy) != 0} {
    if (tuning_.busy_poll_us > 0) require_busy_poll(tuning_.busy_poll_us);
    if (tuning_.zero_copy) allow_zero_copy(Socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)).fd());
  }

  // Of the side that sends: whether zerocopy was what it says.
  std::map<std::string, std::string> details() const override {
    ZeroCopyCount sum;
    for (const auto& one : peers()) {
      const ZeroCopyCount count = static_cast<const TcpPeer&>(*one).zero_copy_count();
      sum.calls += count.calls;
      sum.copied += count.copied;
      sum.refused += count.refused;
    }
    if (sum.calls + sum.refused == 0) return {};
    return {{"zerocopy", std::to_string(sum.calls) + " calls, " + std::to_string(sum.copied) +
                             " of them copied by the kernel all the same; " + std::to_string(sum.refused) +
                             " more copied for want of room (net.core.optmem_max, ulimit -l)"}};
  }

 private:
  std::shared_ptr<LanePeer> make_peer(EventQueue& events, std::uint32_t id, std::vector<Socket> lanes) override {
    if (lanes.size() < 2) throw Error(Fault::usage, "the peer opened no data connection: it does not run backend tcp");
    return std::make_shared<TcpPeer>(events, id, std::move(lanes), tuning_);
  }

  const Tuning tuning_;
};

}  // namespace

Probe probe() {
  Probe found = kernel_probe("tcp");
  found.available = true;
  return found;
}

std::unique_ptr<Context> open(const Token& token, const Options& options) {
  static constexpr OptionBounds known[] = {connections, chunk_kib,    pieces_per_call, pin,
                                           reno_on_lo,  busy_poll_us, zero_copy};
  refuse_unknown(options, known);
  return std::make_unique<TcpContext>(token, options);
}

}  // namespace kvxfer::tcp
