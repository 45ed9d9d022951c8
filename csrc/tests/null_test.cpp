#include "tests/pair.h"

namespace kvxfer::test {
namespace {

TEST(null, confirms_without_moving_anything) {
  Pair pair(4096, {}, "null");
  CHECK(!pair.a.context->capabilities().moves_data);
  CHECK_EQ(pair.a.peer->describe().front(), "none");
  PlanPieces pieces;
  pieces.add(0, 0, 4096);
  const auto plans = pair.prepare(pieces);
  for (const Op op : {Op::push, Op::pull}) {
    pair.a.context->post(*plans.first, op, {}, 5, nullptr);
    pair.a.wait(EventKind::confirmed, 5);
    pair.b.wait(EventKind::delivered, 5);
  }
  CHECK_EQ(pair.arrived(pieces), 0U);
  CHECK_EQ(pair.a.context->bytes_moved(), 0U);
}

TEST(null, does_not_join_another_backend) {
  for (const auto& [listens, connects] : {std::pair{"tcp", "null"}, {"null", "tcp"}}) {
    const auto server = find_backend(listens).open(token, {});
    const auto client = find_backend(connects).open(token, {});
    const std::string endpoint = server->listen("127.0.0.1", 0);
    together([&] { client->connect(endpoint, soon()); },
             [&] { CHECK_THROWS(Fault::usage, "does not run backend", server->accept(soon())); });
  }
}

}  // namespace
}  // namespace kvxfer::test
