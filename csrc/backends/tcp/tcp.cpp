#include "backends/tcp/tcp.h"

#include "backend/lane_context.h"
#include "backends/tcp/peer.h"

namespace kvxfer::tcp {

namespace {

constexpr OptionBounds connections{"connections", 1, max_lanes - 1, 2};
constexpr OptionBounds chunk_kib{"chunk_kib", 4, 1 << 20, 1024};
constexpr OptionBounds pieces_per_call{"pieces_per_call", 1, 1023, 64};
constexpr OptionBounds pin{"pin", 0, 1, 0};

Capabilities abilities() {
  Capabilities c;
  c.max_inflight = max_inflight;
  c.push_confirmed_by = Confirms::target;
  return c;
}

class TcpContext final : public LaneContext {
 public:
  TcpContext(const Token& token, const Options& options)
      : LaneContext(abilities(), token, static_cast<std::uint16_t>(1 + option(options, connections))),
        chunk_{static_cast<std::uint64_t>(option(options, chunk_kib)) << 10,
               static_cast<std::size_t>(option(options, pieces_per_call))},
        pin_(option(options, pin) != 0) {}

 private:
  std::shared_ptr<LanePeer> make_peer(EventQueue& events, std::uint32_t id, std::vector<Socket> lanes) override {
    if (lanes.size() < 2) throw Error(Fault::usage, "the peer opened no data connection: it does not run backend tcp");
    return std::make_shared<TcpPeer>(events, id, std::move(lanes), chunk_, pin_);
  }

  const Chunking chunk_;
  const bool pin_;
};

}  // namespace

Probe probe() {
  Probe found = kernel_probe("tcp");
  found.available = true;
  return found;
}

std::unique_ptr<Context> open(const Token& token, const Options& options) {
  static constexpr OptionBounds known[] = {connections, chunk_kib, pieces_per_call, pin};
  refuse_unknown(options, known);
  return std::make_unique<TcpContext>(token, options);
}

}  // namespace kvxfer::tcp
