// ucx where something goes wrong or comes late: wake-ups, wire-ups that fail, the end of a side.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdlib>

#include "backend/lane.h"
#include "backend/lane_peer.h"
#include "backends/ucx/ucx.h"
#include "tests/check.h"
#include "tests/conformance/rig.h"

namespace kvxfer::test {
namespace {

bool here() { return ucx::probe().available; }

Opener opener(const Options& options) {
  return [options] { return ucx::open(token, options); };
}

// What backends/ucx/wire_up.h has on the wire, without UCX's own headers.
struct Offer {
  std::uint32_t magic = 0x4f58564b;
  std::uint32_t endpoints = 1;
  std::uint8_t rest[8] = {};
};
struct Answer {
  std::uint32_t magic = 0x4158564b;
  std::uint32_t family = 0;
  std::uint8_t address[16] = {};
};
struct EndpointAddress {
  std::uint64_t client_id = 1;
  std::uint16_t port = 1;
  std::uint8_t reserved[6] = {};
};

// A peer by hand, that has offered a wire-up to a listener and is answered.
std::vector<Socket> offered(const std::string& endpoint, std::uint32_t endpoints = 1) {
  auto lanes = connect_lanes(endpoint, token, 1, soon());
  Offer offer;
  offer.endpoints = endpoints;
  send_all(lanes[0].fd(), &offer, sizeof offer);
  Answer answer;
  receive_all(lanes[0].fd(), &answer, sizeof answer);
  return lanes;
}

// The endpoint that moves the last bytes need not be the one that sends notices, which sleeps by then.
TEST(ucx_faults, the_end_is_told_whichever_endpoint_comes_to_it) {
  if (!here()) return;
  constexpr std::uint64_t times = 20;
  constexpr std::uint64_t bytes = 4 << 20;
  Pair pair(opener({{"endpoints", 2}}), {bytes});
  const Plans plans = pair.prepare(one_piece(bytes));
  std::uint64_t late = 0;
  for (std::uint64_t tag = 1; tag <= times; ++tag) {
    const Nanoseconds began = now_ns();
    pair.a.context->post(*plans.first, Op::push, {}, tag, nullptr);
    pair.a.wait(EventKind::confirmed, tag);
    if (now_ns() - began > second * 8 / 10) ++late;
  }
  CHECK(late < times / 4);  // a busy machine has its moments
}

// Whoever hears that the peer is lost may free its memory: nothing is under way on any endpoint.
TEST(ucx_faults, a_peer_is_lost_when_every_transfer_has_ended) {
  if (!here()) return;
  constexpr std::uint64_t bytes = 4 << 20;
  for (const Options& options : {Options{{"endpoints", 3}}, {{"endpoints", 2}, {"errors", 1}}})
    for (int repeat = 0; repeat < 4; ++repeat) {
      Pair pair(opener(options), {bytes});
      const Plans plans = pair.prepare(one_piece(bytes));
      pair.a.context->post(*plans.first, Op::push, {}, 1, nullptr);
      pair.b.context->close();
      std::vector<EventKind> told;
      while (told.empty() || told.back() != EventKind::peer_lost) {
        Event event;
        if (pair.a.context->poll({&event, 1}, soon()) == 0) break;
        if (event.kind != EventKind::local) told.push_back(event.kind);
      }
      CHECK_EQ(told.size(), 2U);
      CHECK(told.front() == EventKind::error || told.front() == EventKind::confirmed);
    }
}

// Both sides end their endpoints, and who has no reason of its own says that the other hung up.
TEST(ucx_faults, a_side_that_cannot_put_says_so) {
  if (!here()) return;
  constexpr std::uint64_t bytes = 4096;
  ::setenv("UCX_PROTO_ENABLE", "n", 1);  // 1.22 puts nothing then
  for (int repeat = 0; repeat < 30; ++repeat) {
    Pair pair(opener({}), {bytes});
    const Plans plans = pair.prepare(one_piece(bytes));
    pair.a.context->post(*plans.first, Op::push, {}, 1, nullptr);
    Event event{};
    while (event.kind != EventKind::peer_lost && event.kind != EventKind::confirmed)
      if (pair.a.context->poll({&event, 1}, soon()) == 0) break;
    if (event.kind == EventKind::confirmed) break;
    CHECK(pair.a.peer->lost().starts_with("UCX cannot put or get pieces as it is set"));
  }
  ::unsetenv("UCX_PROTO_ENABLE");
}

// A listening side whose token is right, and that listens at none of the addresses that it names.
void refuse_endpoints(const Options& options) {
  LaneListener listener("127.0.0.1", 0, token);
  const auto connects = ucx::open(token, options);
  together([&] { CHECK_THROWS(Fault::peer_lost, "could not reach", connects->connect(listener.endpoint(), soon())); },
           [&] {
             const auto lanes = listener.accept(soon());
             Offer offer;
             receive_all(lanes[0].fd(), &offer, sizeof offer);
             Answer answer;
             const EndpointAddress address;
             send_all(lanes[0].fd(), &answer, sizeof answer);
             send_all(lanes[0].fd(), &address, sizeof address);
             char ready = 0;
             receive_all(lanes[0].fd(), &ready, 1);  // the first of a farewell, if any
             CHECK(ready != 1);
           });
}

TEST(ucx_faults, endpoints_that_are_not_there_are_not_reached) {
  if (!here()) return;
  refuse_endpoints({});
  refuse_endpoints({{"errors", 1}});  // what is sent to the peer ends in an error there, and nothing else tells
}

// A firewall, or a forwarder that knows one port only: the connection to UCX's listener stands, and nobody speaks.
TEST(ucx_faults, endpoints_that_do_not_answer_are_given_up_in_time) {
  if (!here()) return;
  LaneListener listener("127.0.0.1", 0, token), silent("127.0.0.1", 0, token);
  const auto connects = ucx::open(token, {});
  const Deadline shortly = Deadline::after(second / 2);
  together(
      [&] { CHECK_THROWS(Fault::peer_lost, "ports that follow", connects->connect(listener.endpoint(), shortly)); },
      [&] {
        const auto lanes = listener.accept(soon());
        Offer offer;
        receive_all(lanes[0].fd(), &offer, sizeof offer);
        const Answer answer;
        EndpointAddress address;
        address.port = static_cast<std::uint16_t>(std::stoi(silent.endpoint().substr(sizeof "127.0.0.1")));
        send_all(lanes[0].fd(), &answer, sizeof answer);
        send_all(lanes[0].fd(), &address, sizeof address);
        char byte = 0;
        while (receive_all(lanes[0].fd(), &byte, 1) == 0) continue;
      });
}

bool listened_to(std::uint16_t port) {
  const Socket socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return ::connect(socket.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
}

// Its context lives on, and so does what it remembers of the peer.
TEST(ucx_faults, a_wire_up_that_fails_leaves_no_port_open) {
  if (!here()) return;
  const auto listens = ucx::open(token, {});
  const std::string endpoint = listens->listen("127.0.0.1", 0);
  EndpointAddress there;
  together([&] { CHECK_THROWS(Fault::peer_lost, "", listens->accept(soon())); },
           [&] {
             const auto lanes = offered(endpoint);
             receive_all(lanes[0].fd(), &there, sizeof there);
             CHECK(listened_to(there.port));
           });
  CHECK(!listened_to(there.port));
}

// The ports that a firewall has to let through; what another process has of them is left out.
TEST(ucx_faults, listeners_use_the_ports_that_follow_a_data_port) {
  if (!here()) return;
  std::uint16_t data_port = 0, taken = 0;
  Socket other(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  std::unique_ptr<Context> listens;
  std::string endpoint;
  for (data_port = 20'000; endpoint.empty(); data_port += 2) {  // below those that the kernel gives
    CHECK(data_port < 30'000);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(taken = data_port + 1);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::bind(other.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) continue;
    listens = ucx::open(token, {});
    try {
      endpoint = listens->listen("127.0.0.1", data_port);
    } catch (const Error&) {
      other = Socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    }
  }
  EndpointAddress there[2];
  together([&] { CHECK_THROWS(Fault::peer_lost, "", listens->accept(soon())); },
           [&] {
             const auto lanes = offered(endpoint, 2);
             receive_all(lanes[0].fd(), there, sizeof there);
           });
  CHECK(there[0].port > taken && there[0].port < taken + 256);
  CHECK(there[1].port > there[0].port && there[1].port < taken + 256);
}

// A socket that listens everywhere takes IPv4 too, and names its addresses in the way of IPv6.
TEST(ucx_faults, ipv4_reaches_a_socket_of_ipv6) {
  if (!here()) return;
  const auto listens = ucx::open(token, {}), connects = ucx::open(token, {});
  std::string endpoint;
  try {
    endpoint = listens->listen("::", 0);
  } catch (const Error&) {
    return;  // a machine without IPv6
  }
  std::shared_ptr<Peer> theirs, ours;
  together([&] { theirs = listens->accept(soon()); },
           [&] { ours = connects->connect("127.0.0.1" + endpoint.substr(endpoint.rfind(':')), soon()); });
  CHECK_EQ(ours->describe().front(), "tcp/lo");
  CHECK_EQ(theirs->describe().front(), "tcp/lo");
}

// UCX would end the process.
TEST(ucx_faults, ipv6_where_ucx_takes_ipv4_is_refused) {
  if (!here()) return;
  for (const bool told : {false, true}) {
    if (told) ::setenv("UCX_TCP_AF_PRIO", "inet6,inet", 1);
    const auto listens = ucx::open(token, {}), connects = ucx::open(token, {});
    std::string endpoint;
    try {
      endpoint = listens->listen("::1", 0);
    } catch (const Error&) {
      return;  // a machine without IPv6
    }
    const auto connect = [&] { connects->connect(endpoint, soon()); };
    if (told)
      together([&] { listens->accept(soon()); }, connect);
    else
      together([&] { CHECK_THROWS(Fault::unavailable, "set UCX_TCP_AF_PRIO=inet6", listens->accept(soon())); },
               [&] { CHECK_THROWS(Fault::unavailable, "set UCX_TCP_AF_PRIO=inet6", connect()); });
  }
  ::unsetenv("UCX_TCP_AF_PRIO");
}

// Any other byte than the one that says that it is connected.
TEST(ucx_faults, a_peer_that_gives_up_its_wire_up_is_not_waited_for) {
  if (!here()) return;
  const auto listens = ucx::open(token, {});
  const std::string endpoint = listens->listen("127.0.0.1", 0);
  together([&] { CHECK_THROWS(Fault::peer_lost, "gave up", listens->accept(soon())); },
           [&] {
             const auto lanes = offered(endpoint);
             send_all(lanes[0].fd(), "K", 1);
             char byte = 0;
             while (receive_all(lanes[0].fd(), &byte, 1) == 0) continue;
           });
}

// Children of this process would take them for the user's, and say so in results.
TEST(ucx_faults, nothing_of_ours_stays_in_the_environment) {
  if (!here()) return;
  ucx::open(token, {});
  for (const char* name : {"UCX_LOG_FILE", "UCX_LOG_LEVEL", "UCX_HANDLE_ERRORS", "UCX_WARN_UNUSED_ENV_VARS"})
    CHECK(std::getenv(name) == nullptr);
}

TEST(ucx_faults, close_ends_a_wire_up_while_it_makes_endpoints) {
  if (!here()) return;
  for (int time = 0; time < 6; ++time) {
    const auto listens = ucx::open(token, {});
    const std::string endpoint = listens->listen("127.0.0.1", 0);
    together(
        [&] {
          try {
            listens->accept(soon());
            fail(__FILE__, __LINE__, "a peer that never connected");
          } catch (const Error&) {  // lost, or closed by then
          }
        },
        [&] {
          const auto lanes = connect_lanes(endpoint, token, 1, soon());
          Offer offer;
          offer.endpoints = 8;
          send_all(lanes[0].fd(), &offer, sizeof offer);
          std::this_thread::sleep_for(std::chrono::microseconds(500) * time);
          listens->close();
        });
  }
}

// Whoever closes with a pull open is told of its end when the other side writes no more of it: not before.
TEST(ucx_faults, a_pull_that_close_ends_is_written_no_more_once_that_is_told) {
  if (!here()) return;
  constexpr std::uint64_t bytes = 64 << 20;
  for (const Options& options : {Options{{"pull", 2}}, {{"pull", 2}, {"endpoints", 2}}}) {
    Pair pair(opener(options), {bytes});
    const Plans plans = pair.prepare(one_piece(bytes));
    std::memset(pair.a.region.address, 1, bytes);
    std::memset(pair.b.region.address, 2, bytes);
    pair.a.context->arm(*plans.first, Op::pull, {}, 1);
    pair.b.context->post(*plans.second, Op::pull, {}, 1, nullptr);
    while (pair.b.context->bytes_moved() == 0 && pair.a.context->bytes_moved() == 0) std::this_thread::yield();
    std::jthread closes([&] { pair.b.context->close(); });
    pair.b.wait(EventKind::error, 1);
    const std::vector<std::byte> then(pair.b.region.address, pair.b.region.address + bytes);
    closes.join();
    CHECK(std::memcmp(then.data(), pair.b.region.address, bytes) == 0);
  }
}

// Whether UCX is done with a piece at once or later, and whoever moves it: what stands still is told by this alone.
TEST(ucx_faults, both_sides_count_each_byte_once) {
  if (!here()) return;
  for (const Options& options :
       {Options{{"pull", 1}}, {{"pull", 2}}, {{"endpoints", 3}}, {{"window", 1}}, {{"errors", 1}}})
    for (const PlanPieces& pieces : {one_piece(4 << 20), shuffled(256, 512, 64)}) {
      const Subject subject{"ucx", opener(options)};
      Rig rig(subject, {4 << 20});
      const auto plans = rig.prepare(pieces);
      rig.move(plans, Op::push, 1);
      rig.move(plans, Op::pull, 2);
      for (const End* side : {&rig.a, &rig.b}) CHECK_EQ(side->context->bytes_moved(), 2 * pieces.bytes());
    }
}

TEST(ucx_faults, a_closed_context_allocates_nothing) {
  if (!here()) return;
  for (const Options& options : {Options{}, {{"pool", 1}}}) {
    const auto closed = ucx::open(token, options);
    closed->close();
    CHECK_THROWS(Fault::usage, "closed", closed->allocate(4096, MemoryKind::host, -1));
  }
}

// As one piece, whichever part of it is the first to be registered: every piece needs a key, and RDMA to be pinned.
TEST(ucx_faults, allocated_memory_is_registered_as_a_whole) {
  if (!here()) return;
  constexpr std::uint64_t whole = 1 << 20;
  constexpr std::size_t at_pool_bytes = 16 + sizeof(RegionKey) + 16;  // in keys of one region: see memory.cpp
  const auto context = ucx::open(token, {});
  const Region all = context->allocate(whole, MemoryKind::host, -1);
  const Region part = context->register_memory(all.address + 4096, 4096, MemoryKind::host);
  const std::string keys = context->export_keys(std::span(&part, 1));
  std::uint64_t bytes = 0;
  CHECK(keys.size() > at_pool_bytes + sizeof bytes);
  std::memcpy(&bytes, keys.data() + at_pool_bytes, sizeof bytes);
  CHECK_EQ(bytes, whole);
}

// One whose wire-up failed is among them, and was never asked anything.
TEST(ucx_faults, details_are_told_whatever_became_of_peers) {
  if (!here()) return;
  const auto listens = ucx::open(token, {});
  const std::string endpoint = listens->listen("127.0.0.1", 0);
  together([&] { CHECK_THROWS(Fault::peer_lost, "", listens->accept(soon())); },
           [&] { connect_lanes(endpoint, token, 1, soon()); });
  CHECK(!listens->details().contains("pull"));
  const auto connects = ucx::open(token, {});
  std::shared_ptr<Peer> ours;
  together([&] { listens->accept(soon()); }, [&] { ours = connects->connect(endpoint, soon()); });
  CHECK(listens->details().contains("pull"));
}

}  // namespace
}  // namespace kvxfer::test
