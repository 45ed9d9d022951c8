// What is ucx's own: its library, its options, its keys, whom it lets in, and pulls in both ways.
#include "backends/ucx/ucx.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "backend/lane.h"
#include "tests/check.h"
#include "tests/conformance/rig.h"

namespace kvxfer::test {
namespace {

bool here() { return ucx::probe().available; }

Subject subject(const Options& options) {
  return {"ucx", [options] { return ucx::open(token, options); }};
}

TEST(ucx, probe_tells_path_version_and_transports) {
  const Probe found = ucx::probe();
  if (!found.available) {
    CHECK(!found.why_not.empty());
    return;
  }
  CHECK(found.library_path.find("libucp") != std::string::npos);
  CHECK(found.library_version.starts_with("1."));
  CHECK(found.transports.starts_with("self,tcp"));
  CHECK(ucx::present());
}

TEST(ucx, options_out_of_bounds_are_refused) {
  if (!here()) return;
  CHECK_THROWS(Fault::usage, "endpoints=0 is outside 1…64", ucx::open(token, {{"endpoints", 0}}));
  CHECK_THROWS(Fault::usage, "errors=2", ucx::open(token, {{"errors", 2}}));
  CHECK_THROWS(Fault::usage, "window=0", ucx::open(token, {{"window", 0}}));
  CHECK_THROWS(Fault::usage, "unknown backend option 'tls'", ucx::open(token, {{"tls", 1}}));
}

// Every way of moving bytes puts each of them where it belongs.
TEST(ucx, pushes_and_pulls_with_every_setting) {
  if (!here()) return;
  for (const Options& options : {Options{{"pull", 1}},
                                 {{"pull", 2}},
                                 {{"endpoints", 3}},
                                 {{"endpoints", 3}, {"pull", 1}},
                                 {{"window", 1}},
                                 {{"errors", 1}},
                                 {{"errors", 1}, {"pool", 1}}}) {
    const Subject one = subject(options);
    Rig rig(one, {4 << 20});
    const PlanPieces pieces = shuffled(1024, 4096, 64);
    const auto plans = rig.prepare(pieces);
    for (std::uint64_t tag = 1; tag <= 4; ++tag)
      for (const Op op : one.ops()) {
        rig.poison_target();
        rig.move(plans, op, tag);
        rig.require_moved(pieces);
      }
    CHECK(rig.a.peer->describe().size() <= (options.contains("endpoints") ? 3U : 1U));
  }
}

TEST(ucx, describe_names_what_carries_the_bytes) {
  if (!here()) return;
  const Subject over_tcp = subject({});
  Rig rig(over_tcp, {4096});
  CHECK_EQ(rig.a.peer->describe().front(), "tcp/lo");
  CHECK_EQ(rig.a.context->details().at("errors"), "peer");
  CHECK_EQ(rig.a.context->details().at("pull"), "put by the target, when asked");
  const Subject by_memory = subject({{"errors", 1}});
  Rig other(by_memory, {4096});
  CHECK(other.a.peer->describe().front() != "tcp/lo");  // cma or posix: what this machine lets UCX use
  CHECK_EQ(other.a.context->details().at("errors"), "none");
}

// Before anything is moved the lanes are all that is known, and of those it may be another one.
TEST(ucx, describe_names_what_has_carried_them) {
  if (!here()) return;
  const Subject by_memory = subject({{"errors", 1}, {"pool", 1}});
  Rig rig(by_memory, {1 << 20});
  const PlanPieces pieces = shuffled(64, 4096, 4);
  const auto plans = rig.prepare(pieces);
  CHECK(!rig.a.context->details().contains("protocol"));
  rig.move(plans, Op::push, 1);
  const std::string pushed = rig.a.context->details().at("protocol");
  CHECK(pushed.starts_with("put "));
  CHECK(!rig.b.context->details().contains("protocol"));
  rig.move(plans, Op::pull, 2);
  CHECK(rig.b.context->details().at("protocol").starts_with("get "));
  CHECK_EQ(rig.a.context->details().at("protocol"), pushed);
  CHECK(rig.a.peer->describe().front().find('/') != std::string::npos);
}

// Endpoints that have moved nothing have lanes, and nothing was carried by those.
TEST(ucx, describe_leaves_out_what_has_carried_nothing) {
  if (!here()) return;
  const Subject several = subject({{"endpoints", 4}});
  Rig rig(several, {4096});
  CHECK_EQ(rig.a.peer->describe().size(), 4U);
  rig.move(rig.prepare(one_piece(4096)), Op::push, 1);
  if (rig.a.context->details().contains("protocol")) CHECK_EQ(rig.a.peer->describe().size(), 1U);
}

// Whatever is missing for it here: UCX would take what it is told is a GPU's for that, or a GPU's for the CPU's.
TEST(ucx, cuda_memory_is_refused_where_ucx_finds_no_gpu) {
  if (!here()) return;
  const auto context = ucx::open(token, {});
  if (context->capabilities().memory.size() > 1) return;
  const Region host = context->allocate(4096, MemoryKind::host, -1);
  const bool has_module = ucx::probe().transports.find(",cuda") != std::string::npos;
  const char* const says = has_module ? "takes" : "without CUDA";  // a driver and a device, or a later version
  CHECK_THROWS(Fault::unavailable, says, context->register_memory(host.address, 4096, MemoryKind::cuda));
  CHECK_THROWS(Fault::unavailable, says, context->allocate(4096, MemoryKind::cuda, -1));
  CHECK_EQ(context->details().at("memory"), "host");
  context->close();
  CHECK_THROWS(Fault::usage, "closed", context->register_memory(host.address, 4096, MemoryKind::cuda));
}

// The side that connects decides for both.
TEST(ucx, sides_with_different_options_agree) {
  if (!here()) return;
  bool first = true;
  const Opener open = [&] { return ucx::open(token, {{"endpoints", std::exchange(first, false) ? 2 : 1}}); };
  Pair pair(open, {65536});
  CHECK_EQ(pair.a.peer->describe().size(), 2U);
  CHECK_EQ(pair.b.peer->describe().size(), 2U);
}

TEST(ucx, variables_of_ucx_are_told_and_its_own_are_not) {
  if (!here()) return;
  ::setenv("UCX_RNDV_THRESH", "123456", 1);
  const auto details = ucx::open(token, {})->details();
  ::unsetenv("UCX_RNDV_THRESH");
  CHECK_EQ(details.at("UCX_RNDV_THRESH"), "123456");
  CHECK(!details.contains("UCX_LOG_FILE"));
}

TEST(ucx, transports_that_it_has_not_are_refused) {
  if (!here()) return;
  ::setenv("UCX_TLS", "no_such_transport", 1);
  CHECK_THROWS(Fault::unavailable, "UCX_TLS", ucx::open(token, {}));
  ::unsetenv("UCX_TLS");
}

// One whose token was right, and then says anything: the listening side says so, and waits no more.
TEST(ucx, a_peer_of_another_backend_is_refused) {
  if (!here()) return;
  const auto listens = ucx::open(token, {});
  const std::string endpoint = listens->listen("127.0.0.1", 0);
  together([&] { CHECK_THROWS(Fault::usage, "another one", listens->accept(soon())); },
           [&] {
             const auto lanes = connect_lanes(endpoint, token, 1, soon());
             const std::string noise(64, 'x');
             send_all(lanes[0].fd(), noise.data(), noise.size());
             char byte = 0;
             receive_all(lanes[0].fd(), &byte, 1);
           });
}

// In the middle of its wire-up: neither side waits for longer than it was told.
TEST(ucx, a_peer_that_goes_during_the_wire_up_is_lost) {
  if (!here()) return;
  const auto listens = ucx::open(token, {});
  const std::string endpoint = listens->listen("127.0.0.1", 0);
  together([&] { CHECK_THROWS(Fault::peer_lost, "", listens->accept(soon())); },
           [&] { connect_lanes(endpoint, token, 1, soon()); });
  together([&] { CHECK_THROWS(Fault::peer_lost, "", listens->accept(Deadline::after(second / 5))); },
           [&] {
             const auto lanes = connect_lanes(endpoint, token, 1, soon());
             char byte = 0;
             receive_all(lanes[0].fd(), &byte, 1);  // says nothing
           });
}

}  // namespace
}  // namespace kvxfer::test
