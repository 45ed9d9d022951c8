#include "backends/cma/cma.h"

#include <unistd.h>

#include <climits>

#include "backend/lane_context.h"
#include "backends/cma/access.h"
#include "backends/cma/peer.h"

namespace kvxfer::cma {

namespace {

// Of each peer.
constexpr OptionBounds threads{"threads", 1, 64, 2};
constexpr OptionBounds pieces_per_call{"pieces_per_call", 1, IOV_MAX, 64};

Capabilities abilities() {
  Capabilities c;
  c.one_sided = true;
  c.max_inflight = max_inflight;
  c.push_confirmed_by = Confirms::target;
  return c;
}

class CmaContext final : public LaneContext {
 public:
  CmaContext(const Token& token, const Options& options)
      : LaneContext(abilities(), token, 1, Wire::local),
        effort_{static_cast<std::size_t>(option(options, threads)),
                static_cast<std::size_t>(option(options, pieces_per_call))} {}

 private:
  std::shared_ptr<LanePeer> make_peer(EventQueue& events, std::uint32_t id, std::vector<Socket> lanes) override {
    if (lanes.size() != 1) throw Error(Fault::usage, "the peer opened data connections: it does not run backend cma");
    return std::make_shared<CmaPeer>(events, id, std::move(lanes), effort_);
  }
  RegionKey key(const Region& region) const override {
    return {region.id, 0, region.bytes, reinterpret_cast<std::uintptr_t>(region.address)};
  }

  const CopyPeer::Effort effort_;
};

// Why this process cannot even reach into itself, or no process into another; "" when they can.
std::string why_not_here() {
  char from = 'k', to = 0;
  const iovec local{&to, 1}, remote{&from, 1};
  const ssize_t done = call(Op::pull, ::getpid(), {&local, 1}, {&remote, 1});
  if (done < 0) return why_refused(static_cast<int>(-done));
  if (done != 1 || to != from) return "process_vm_readv copied nothing";
  if (const int code = try_to_write(::getpid())) return why_refused(code);
  return why_yama_refuses();  // which lets every process reach into itself
}

}  // namespace

Probe probe() {
  Probe found = kernel_probe("process_vm");
  found.why_not = why_not_here();
  found.available = found.why_not.empty();
  return found;
}

std::unique_ptr<Context> open(const Token& token, const Options& options) {
  static constexpr OptionBounds known[] = {threads, pieces_per_call};
  refuse_unknown(options, known);
  return std::make_unique<CmaContext>(token, options);
}

}  // namespace kvxfer::cma
