// ucx where something goes wrong or comes late: wake-ups, wire-ups that fail, the end of a side.
#include "backends/ucx/ucx.h"
#include "tests/check.h"
#include "tests/conformance/rig.h"

namespace kvxfer::test {
namespace {

bool here() { return ucx::probe().available; }

Opener opener(const Options& options) {
  return [options] { return ucx::open(token, options); };
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

}  // namespace
}  // namespace kvxfer::test
