#include "backends/ucx/ucx.h"

#include <unistd.h>

#include <algorithm>

#include "backend/lane_context.h"
#include "backends/ucx/context.h"
#include "backends/ucx/peer.h"
#include "backends/ucx/transport.h"
#include "backends/ucx/wire_up.h"
#include "memory/pattern.h"

namespace kvxfer::ucx {

namespace {

// Beyond it the request is no pool, and UCX need not be asked.
constexpr std::uint64_t most_of_ucx = std::uint64_t{1} << 46;
constexpr OptionBounds endpoints{"endpoints", 1, most_endpoints, 1};
constexpr OptionBounds errors{"errors", 0, 1, 0};
constexpr OptionBounds pull{"pull", 0, 2, 0};
constexpr OptionBounds allocation{"pool", 0, 1, 0};
constexpr OptionBounds window{"window", 1, 4096, 128};
constexpr OptionBounds spin{"spin_us", 0, 1000, 50};

Settings settings_of(const Options& options) {
  return {static_cast<std::uint32_t>(option(options, endpoints)),
          static_cast<Errors>(option(options, errors)),
          static_cast<Pull>(option(options, pull)),
          static_cast<std::uint32_t>(option(options, window)),
          1000 * static_cast<Nanoseconds>(option(options, spin)),
          0};
}

Capabilities abilities(bool cuda) {
  Capabilities c;
  c.one_sided = true;  // a thread of ours progresses
  c.max_inflight = max_inflight;
  c.push_confirmed_by = Confirms::target;
  if (cuda) c.memory.push_back(MemoryKind::cuda);
  return c;
}

class UcxContext final : public LaneContext {
 public:
  UcxContext(const Token& token, const Settings& settings, bool own_allocation, std::shared_ptr<UcpContext> ucp)
      : LaneContext(abilities(ucp->has_cuda()), token, 1),
        settings_(settings),
        own_allocation_(own_allocation),
        ucp_(std::move(ucp)) {}
  ~UcxContext() override { LaneContext::close(); }  // the peers' threads use what is destroyed next

  // UCX's own allocation can be mapped by another process; any other memory is copied by the kernel there (cma).
  Region allocate(std::uint64_t bytes, MemoryKind kind, int numa) override {
    require_open();
    require_kind(kind);
    if (kind == MemoryKind::cuda)
      throw Error(Fault::unavailable,
                  "backend ucx allocates no cuda memory: register what the engine has allocated (cuMemAlloc, torch)");
    if (!own_allocation_ || bytes == 0 || bytes > most_of_ucx) {
      const Region region = LaneContext::allocate(bytes, kind, numa);
      ucp_->remember(region.address, region.bytes);
      return region;
    }
    if (numa >= 0) throw Error(Fault::unavailable, "UCX's own allocation cannot be placed on a NUMA node: pool=0 can");
    const Pool made = ucp_->allocate(bytes);
    auto* const address = reinterpret_cast<std::byte*>(made.address);
    poison(address, bytes);  // every page is there before it is handed out
    return LaneContext::register_memory(address, bytes, kind);
  }
  Region register_memory(std::byte* address, std::uint64_t bytes, MemoryKind kind) override {
    require_region(address, bytes, kind);
    ucp_->map(address, bytes, kind);
    return LaneContext::register_memory(address, bytes, kind);
  }

  std::string listen(const std::string& address, std::uint16_t port) override {
    settings_.data_port = port;
    return LaneContext::listen(address, port);
  }

  // The variables of UCX, which it obeys, are part of what was measured.
  std::map<std::string, std::string> details() const override {
    std::map<std::string, std::string> found{{"errors", settings_.errors == Errors::peer ? "peer" : "none"},
                                             {"transports", library().transports()}};
    if (const std::string kinds = ucp_->kinds(); !kinds.empty()) found["memory"] = kinds;
    for (const auto& one : peers()) {
      const auto& peer = static_cast<const UcxPeer&>(*one);
      if (!peer.wired_up()) continue;
      found["pull"] = peer.pulls_by_put() ? "put by the target, when asked" : "get";
      if (const std::string protocols = peer.protocols(); !protocols.empty()) add(found["protocol"], protocols, ", ");
    }
    for (char** one = environ; *one != nullptr; ++one) {
      const std::string text = *one;
      const std::size_t equals = text.find('=');
      if (text.starts_with("UCX_") && equals != std::string::npos)
        found[text.substr(0, equals)] = text.substr(equals + 1);
    }
    return found;
  }

  std::string export_keys(std::span<const Region> regions) override {
    Keys keys;
    for (const Region& region : regions) {
      const auto number = ucp_->find(region.address, region.bytes);
      if (!number) throw Error(Fault::usage, "a key is asked for of a region that this context does not have");
      keys.regions.push_back({region.id, static_cast<std::uint32_t>(*number), region.bytes,
                              reinterpret_cast<std::uint64_t>(region.address)});
      if (std::ranges::find(keys.pools, *number, &PoolKey::number) == keys.pools.end())
        keys.pools.push_back(ucp_->key(*number));
    }
    return write(keys);
  }

 private:
  void require_kind(MemoryKind kind) const override {
    if (kind == MemoryKind::cuda) ucp_->require_cuda();
    LaneContext::require_kind(kind);
  }
  std::shared_ptr<LanePeer> make_peer(EventQueue& events, std::uint32_t id, std::vector<Socket> lanes) override {
    if (lanes.size() != 1) throw Error(Fault::usage, "the peer opened data connections: it does not run backend ucx");
    return std::make_shared<UcxPeer>(events, id, std::move(lanes), ucp_, settings_);
  }

  Settings settings_;
  const bool own_allocation_;
  const std::shared_ptr<UcpContext> ucp_;
};

}  // namespace

Probe probe() {
  Probe found;
  try {
    const Library& loaded = library();
    found.library_path = loaded.path;
    found.library_version = loaded.version;
    found.transports = loaded.transports();
    found.warning = loaded.warning;
    found.available = true;
  } catch (const std::exception& error) {
    found.why_not = error.what();
  }
  return found;
}

std::unique_ptr<Context> open(const Token& token, const Options& options) {
  static constexpr OptionBounds known[] = {endpoints, errors, pull, allocation, window, spin};
  refuse_unknown(options, known);
  const Settings settings = settings_of(options);
  const bool own_allocation = option(options, allocation) != 0;
  return std::make_unique<UcxContext>(token, settings, own_allocation,
                                      std::make_shared<UcpContext>(library(), settings.errors));
}

}  // namespace kvxfer::ucx
