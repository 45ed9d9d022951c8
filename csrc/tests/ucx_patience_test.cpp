// Whether a thread of backend ucx that waits asks again or sleeps.
#include "backends/ucx/patience.h"
#include "tests/check.h"

namespace kvxfer::test {
namespace {

using ucx::Patience;

constexpr Nanoseconds longest = 50;

// Waits from `from` on, asking every 10 ns while it may, until news come at `until`; whether it slept.
bool sleeps(Patience& patience, Nanoseconds from, Nanoseconds until) {
  bool slept = false;
  for (Nanoseconds now = from; now < until && !slept; now += 10) slept = !patience.ask_again(now);
  CHECK(patience.waits());
  patience.news(until);
  CHECK(!patience.waits());
  return slept;
}

TEST(ucx_patience, the_first_wait_is_asleep) {
  Patience patience(longest);
  CHECK(sleeps(patience, 0, 20));
}

TEST(ucx_patience, it_asks_where_news_have_come_soon) {
  Patience patience(longest);
  CHECK(sleeps(patience, 0, 180));  // the waking is part of it
  for (const Nanoseconds at : {1000, 2000, 3000}) CHECK(!sleeps(patience, at, at + 40));
}

TEST(ucx_patience, it_asks_in_vain_once) {
  Patience patience(longest);
  sleeps(patience, 0, 20);
  CHECK(patience.ask_again(1000));
  CHECK(patience.ask_again(1040));
  CHECK(!patience.ask_again(1050));
  CHECK(!patience.ask_again(1060));
  patience.news(100'000);
  CHECK(sleeps(patience, 200'000, 300'000));
}

TEST(ucx_patience, over_a_slow_link_it_never_asks) {
  Patience patience(longest);
  for (Nanoseconds at = 0; at < 10'000; at += 1000) {
    CHECK(!patience.ask_again(at));
    patience.news(at + 500);
  }
}

TEST(ucx_patience, none_at_all) {
  Patience patience(0);
  for (const Nanoseconds at : {0, 1000, 2000}) {
    CHECK(!patience.ask_again(at));
    patience.news(at + 1);
  }
}

}  // namespace
}  // namespace kvxfer::test
