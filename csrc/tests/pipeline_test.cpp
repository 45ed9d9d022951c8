#include "backend/pipeline.h"

#include <sys/prctl.h>

#include <algorithm>
#include <mutex>

#include "tests/allocations.h"
#include "tests/rotation.h"
#include "tests/script.h"

namespace kvxfer::test {
namespace {

constexpr Nanoseconds ms = 1'000'000;
constexpr std::uint32_t units = pieces_per_leg;  // each piece is a segment of its own

// Every `step` segments together, each ready when its own unit and those before it are; the same of every leg.
std::vector<Send> sends_of(std::uint32_t step, std::size_t legs = 1) {
  std::vector<Send> sends;
  for (std::uint32_t from = 0; from < units; from += step) {
    Send& send = sends.emplace_back();
    send.ready_after = std::min(from + step, units);
    std::vector<std::uint32_t> segments;
    for (std::uint32_t segment = from; segment < send.ready_after; ++segment) segments.push_back(segment);
    send.segments.assign(legs, segments);
  }
  return sends;
}

// Runs the loop on all nodes of a rotation.
struct Pipelined : Rotation {
  using Rotation::Rotation;
  PipelineResult prefill;
  std::uint64_t wrong = 0;

  void run(const std::vector<Send>& sends, Compute& compute, PipelineSettings set) {
    std::vector<std::exception_ptr> failed(leaves.size() + 1);
    std::vector<PipelineResult> results(leaves.size() + 1);
    const auto one = [&](std::size_t i, const Node& node, Side side) {
      PipelineSettings own = set;
      own.side = side;
      own.seed = seed;
      if (own.stall_ns == 0) own.stall_ns = 20 * second;
      std::vector<Send> part = sends;
      if (i > 0)  // a leaf has one leg
        for (Send& send : part) send.segments = {send.segments[i - 1]};
      try {
        results[i] = run_pipeline(*node.context, node.requests, node.regions, part,
                                  side == Side::prefill ? &compute : nullptr, own);
      } catch (...) {
        failed[i] = std::current_exception();
        node.context->close();
      }
    };
    {
      std::vector<std::jthread> threads;
      for (std::size_t l = 0; l < leaves.size(); ++l)
        threads.emplace_back([&, l] { one(l + 1, leaves[l], other(hub_side)); });
      one(0, hub, hub_side);
    }
    for (const auto& why : failed)
      if (why) std::rethrow_exception(why);
    wrong = 0;
    for (const PipelineResult& result : results) wrong += result.wrong_epochs;
    prefill = results[hub_side == Side::prefill ? 0 : 1];
  }
};

void check_times(const PipelineResult& result, const std::vector<Send>& sends, std::size_t count) {
  CHECK_EQ(result.total_ns.size(), count);
  CHECK_EQ(result.compute_ns.size(), count);
  CHECK_EQ(result.ready_ns.size(), count * sends.size());
  CHECK_EQ(result.usable_ns.size(), count * sends.size());
  for (std::size_t i = 0; i < count; ++i) {
    Nanoseconds last = result.compute_ns[i];
    for (std::size_t s = i * sends.size(); s < (i + 1) * sends.size(); ++s) {
      CHECK(result.usable_ns[s] > result.ready_ns[s]);
      last = std::max(last, result.usable_ns[s]);
    }
    CHECK_EQ(result.total_ns[i], last);
  }
}

TEST(pipeline, push_and_pull_of_every_backend) {
  TimedCompute compute({ms, 0, ms, ms});
  for (const BackendRow& backend : backends()) {
    if (!backend.probe().available) continue;
    const bool checked = std::string(backend.name) != "null";
    Pipelined rotation(3, backend.name);
    std::uint64_t epoch = 1;
    for (const Op op : {Op::push, Op::pull})
      for (const std::uint32_t step : {1U, 2U, 3U, 4U}) {
        const auto sends = sends_of(step);
        rotation.run(sends, compute, {.op = op, .first_epoch = epoch, .count = 5, .check = checked});
        check_times(rotation.prefill, sends, 5);
        CHECK_EQ(rotation.wrong, 0U);
        for (const Nanoseconds ns : rotation.prefill.compute_ns) CHECK_EQ(ns, 3 * ms);
        for (std::size_t s = 0; s < sends.size(); ++s)
          CHECK_EQ(rotation.prefill.ready_ns[s], (sends[s].ready_after < 3 ? 1 : sends[s].ready_after - 1) * ms);
        epoch += 5;
        if (checked) rotation.check_data(epoch - 1);
      }
  }
}

TEST(pipeline, several_legs_from_and_to_either_side) {
  SpinCompute compute(std::vector<Nanoseconds>(units, ms / 10));
  for (const std::size_t leaf_count : {2U, 4U}) {
    Pipelined rotation(4, "tcp", leaf_count);
    std::uint64_t epoch = 1;
    for (const Op op : {Op::push, Op::pull}) {
      const auto own = sends_of(1, leaf_count);
      rotation.run(own, compute, {.op = op, .first_epoch = epoch, .count = 20});
      check_times(rotation.prefill, own, 20);
      CHECK_EQ(rotation.wrong, 0U);
      epoch += 20;
      rotation.check_data(epoch - 1);
    }
  }
}

// As the layers of a pipeline stage: each leg carries some of the sends only.
TEST(pipeline, a_leg_without_segments_of_a_send_has_no_part_in_it) {
  TimedCompute compute(std::vector<Nanoseconds>(units, 0));
  Pipelined rotation(2, "tcp", 2);
  auto sends = sends_of(1, 2);
  for (std::size_t s = 0; s < sends.size(); ++s) sends[s].segments[s % 2].clear();
  std::uint64_t epoch = 1;
  for (const Op op : {Op::push, Op::pull}) {
    rotation.run(sends, compute, {.op = op, .first_epoch = epoch, .count = 4});
    check_times(rotation.prefill, sends, 4);
    CHECK_EQ(rotation.wrong, 4 * pieces_per_leg);  // of each leg's four pieces two did not move, and kept older epochs
    epoch += 4;
  }
}

TEST(pipeline, a_segment_that_is_not_sent_is_seen) {
  TimedCompute compute(std::vector<Nanoseconds>(units, 0));
  Pipelined rotation(2);
  auto sends = sends_of(2);
  sends[1].segments[0].pop_back();
  for (const Op op : {Op::push, Op::pull}) {
    rotation.run(sends, compute, {.op = op, .first_epoch = op == Op::push ? 1U : 9U, .count = 8});
    CHECK_EQ(rotation.wrong, 8U);
  }
}

TEST(pipeline, without_sends_only_compute_is_timed) {
  SpinCompute compute({ms, ms});
  Pipelined rotation(2);
  for (const Op op : {Op::push, Op::pull}) {
    rotation.run({}, compute, {.op = op, .count = 3, .check = false});
    check_times(rotation.prefill, {}, 3);
    for (const Nanoseconds ns : rotation.prefill.total_ns) CHECK(ns >= 2 * ms);
  }
}

TEST(pipeline, loops_that_follow_each_other_closely_do_not_mix) {
  for (const std::size_t leaf_count : {1U, 3U}) {
    Pipelined rotation(2, "tcp", leaf_count);
    std::exception_ptr failed;
    const auto many = [&](Node& node, Side side) {
      TimedCompute compute(std::vector<Nanoseconds>(units, 1000));
      std::uint64_t epoch = 1;
      try {
        for (int round = 0; round < 100; ++round, ++epoch) {
          const Op op = round % 3 == 2 ? Op::pull : Op::push;
          if (round % 4 == 3) {
            node.run(side, {.op = op, .first_epoch = epoch});
            node.require_well();
            continue;
          }
          const PipelineSettings set{side, op, epoch, 1, true, seed, 20 * second};
          const auto result =
              run_pipeline(*node.context, node.requests, node.regions, sends_of(1 + round % 2, node.peers.size()),
                           side == Side::prefill ? &compute : nullptr, set);
          if (result.wrong_epochs > 0) throw Failure("wrong epochs");
        }
      } catch (...) {
        static std::mutex mutex;
        const std::lock_guard lock(mutex);
        if (!failed) failed = std::current_exception();
        node.context->close();
      }
    };
    {
      std::vector<std::jthread> threads;
      for (Node& leaf : rotation.leaves) threads.emplace_back([&] { many(leaf, Side::decode); });
      many(rotation.hub, Side::prefill);
    }
    if (failed) std::rethrow_exception(failed);
  }
}

// With every backend that is there.
TEST(pipeline, a_request_allocates_nothing) {
  SpinCompute compute(std::vector<Nanoseconds>(units, 1000));
  for (const BackendRow& backend : backends()) {
    if (!backend.probe().available) continue;
    Pipelined rotation(4, backend.name, 2);
    const auto sends = sends_of(1, 2);
    std::uint64_t epoch = 1;
    const auto allocations_of = [&](Op op, std::uint32_t count) {
      const std::uint64_t before = allocations();
      rotation.run(sends, compute, {.op = op, .first_epoch = epoch, .count = count});
      epoch += count;
      return allocations() - before;
    };
    for (const Op op : {Op::push, Op::pull}) {
      allocations_of(op, 100);
      const std::uint64_t few = allocations_of(op, 20);
      const std::uint64_t many = allocations_of(op, 500);
      CHECK(many <= few + 16);  // a slot beyond those used so far may be opened for the first time
    }
  }
}

TEST(pipeline, a_peer_that_is_not_there_is_an_error_after_the_stall_time) {
  TimedCompute compute(std::vector<Nanoseconds>(units, 0));
  for (const Op op : {Op::push, Op::pull})
    for (const Side side : {Side::prefill, Side::decode}) {
      const Rotation rotation(1);
      const Nanoseconds began = now_ns();
      CHECK_THROWS(
          Fault::peer_lost, "nothing moved for 100 ms",
          run_pipeline(*rotation.hub.context, rotation.hub.requests, rotation.hub.regions, sends_of(1),
                       side == Side::prefill ? &compute : nullptr, {.side = side, .op = op, .stall_ns = 100 * ms}));
      CHECK(now_ns() - began >= 100 * ms);
      CHECK(now_ns() - began < 5 * second);
    }
}

// Nothing moves while it lasts, and that is no stall.
TEST(pipeline, compute_may_take_longer_than_the_stall_time) {
  TimedCompute compute(std::vector<Nanoseconds>(units, 60 * ms));
  Script script(1);
  const PipelineSettings set{.stall_ns = 100 * ms};
  const auto result = run_pipeline(script, script.requests(1, 1), {}, {}, &compute, set);
  CHECK(result.total_ns[0] >= units * 60 * ms);
}

TEST(pipeline, a_peer_that_dies_ends_the_loop_of_either_side) {
  for (const Op op : {Op::push, Op::pull})
    for (const bool prefill_dies : {false, true}) {
      TimedCompute compute(std::vector<Nanoseconds>(units, ms));
      Pipelined rotation(2);
      const std::jthread dies([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        (prefill_dies ? rotation.hub : rotation.leaves[0]).context->close();
      });
      const Nanoseconds began = now_ns();
      CHECK_THROWS(Fault::peer_lost, "", rotation.run(sends_of(1), compute, {.op = op, .count = 1'000'000}));
      CHECK(now_ns() - began < 10 * second);
    }
}

// --- against a context that says what it is told to

// One more unit has ended at every look.
struct Ladder final : Compute {
  using Compute::Compute;
  std::uint32_t looks = 0;
  void start(Nanoseconds at) override {
    looks = 0;
    std::ranges::fill(ended_, at);
  }
  std::uint32_t done() override { return std::min(looks++, units_); }
  Nanoseconds look_again() const override { return now_ns(); }
};

// Answers what the loop posts or arms, and notes how far the compute was then.
struct Answering final : Script {
  Ladder& compute;
  EventKind answer;
  std::vector<std::uint32_t> looks;
  Answering(Ladder& of, EventKind with) : Script(1), compute(of), answer(with) {}

  void arm(Plan&, Op, std::span<const std::uint32_t>, std::uint64_t tag) override { moved(tag); }
  void post(Plan&, Op, std::span<const std::uint32_t>, std::uint64_t tag, const ReadyFlag*) override { moved(tag); }
  void moved(std::uint64_t tag) {
    looks.push_back(compute.looks - 1);
    say(answer, 0, tag, now_ns());
    say(EventKind::released, 0, tag);
  }
};

constexpr std::uint64_t first_tag = std::uint64_t{5} << 16;

// A timer that may be late would be counted to each send that waits for its layer.
TEST(pipeline, its_timers_are_prompt_and_the_thread_s_are_then_as_before) {
  constexpr int before = 70'000;
  CHECK_EQ(::prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(before), 0, 0, 0), 0);
  struct Watching final : Script {
    int slack_ns = 0;
    Watching() : Script(1) {}
    void post(Plan&, Op, std::span<const std::uint32_t>, std::uint64_t tag, const ReadyFlag*) override {
      slack_ns = ::prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
      say(EventKind::confirmed, 0, tag, now_ns());
      say(EventKind::released, 0, tag);
    }
  } script;
  TimedCompute compute({0});
  script.say(EventKind::armed, 0, first_tag);
  run_pipeline(script, script.requests(1, 1), {}, std::vector<Send>{{1, {{0}}}}, &compute,
               {.first_epoch = 5, .stall_ns = second});
  CHECK_EQ(script.slack_ns, 1);
  CHECK_EQ(::prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0), before);
}

TEST(pipeline, nothing_leaves_before_it_is_computed) {
  for (const Op op : {Op::push, Op::pull}) {
    Ladder compute(40);
    Answering script(compute, op == Op::push ? EventKind::confirmed : EventKind::delivered);
    const std::vector<Send> sends{{10, {{0}}}, {20, {{1}}}, {40, {{2, 3}}}};
    if (op == Op::push)
      for (std::uint64_t s = 0; s < 3; ++s) script.say(EventKind::armed, 0, first_tag + s);
    run_pipeline(script, script.requests(1, 1), {}, sends, &compute, {.op = op, .first_epoch = 5, .stall_ns = second});
    if (op == Op::pull) script.looks.erase(script.looks.begin());  // both sides have met
    CHECK_EQ(script.looks.size(), 3U);
    for (std::size_t s = 0; s < 3; ++s) CHECK_EQ(script.looks[s], sends[s].ready_after);
  }
}

TEST(pipeline, more_sends_than_may_be_open_wait_for_earlier_ones) {
  Script script(1);  // of a backend that takes one transfer at a time
  Ladder compute(units);
  for (std::uint64_t s = 0; s < units; ++s) script.say(EventKind::armed, 0, first_tag + s);
  CHECK_THROWS(
      Fault::peer_lost, "nothing moved",
      run_pipeline(script, script.requests(1, 1), {}, sends_of(1), &compute, {.first_epoch = 5, .stall_ns = 10 * ms}));
  CHECK_EQ(script.take_log(), "post 0 " + std::to_string(first_tag) + "; ");
}

TEST(pipeline, nonsense_of_a_peer_ends_the_loop) {
  const auto run = [](auto say) {
    Script script(1);
    Ladder compute(units);
    script.say(EventKind::armed, 0, first_tag);
    say(script);
    return run_pipeline(script, script.requests(1, 1), {}, sends_of(units), &compute,
                        {.first_epoch = 5, .stall_ns = 100 * ms});
  };
  const auto later = now_ns() + 1000 * second;
  CHECK_THROWS(Fault::peer_lost, "out of turn",
               run([](Script& script) { script.say(EventKind::armed, 0, first_tag); }));
  for (const EventKind kind : {EventKind::confirmed, EventKind::released})
    for (const std::uint64_t wrong : {first_tag - 1, first_tag + 1, std::uint64_t{0}})
      CHECK_THROWS(Fault::peer_lost, "out of turn", run([&](Script& script) { script.say(kind, 0, wrong, later); }));
  CHECK_THROWS(Fault::peer_lost, "ended before it was delivered",
               run([](Script& script) { script.say(EventKind::error, 0, first_tag); }));
  CHECK_THROWS(Fault::peer_lost, "gone", run([](Script& script) {
                 script.peers[0]->why = "gone";
                 script.say(EventKind::peer_lost, 0, 0);
               }));
  CHECK_THROWS(Fault::peer_lost, "no known kind",
               run([](Script& script) { script.say(static_cast<EventKind>(99), 0, first_tag); }));
  CHECK_THROWS(Fault::peer_lost, "nothing moved", run([](Script&) {}));
}

TEST(pipeline, what_makes_no_sense_is_refused) {
  Script script(2);
  TimedCompute compute(std::vector<Nanoseconds>(units, 0));
  const auto run = [&](const std::vector<Send>& sends, PipelineSettings set, Compute* with) {
    return run_pipeline(script, script.requests(1, 2), {}, sends, with, set);
  };
  const PipelineSettings good{.stall_ns = second};
  CHECK_THROWS(Fault::usage, "needs a count", run({}, {.count = 0, .stall_ns = second}, &compute));
  CHECK_THROWS(Fault::usage, "needs a count", run({}, {}, &compute));
  CHECK_THROWS(Fault::usage, "needs a count", run({}, {.first_epoch = 1ULL << 60, .stall_ns = second}, &compute));
  CHECK_THROWS(Fault::usage, "needs a count", run(std::vector<Send>(1 << 15, {1, {{0}, {0}}}), good, &compute));
  CHECK_THROWS(Fault::usage, "it alone", run({}, good, nullptr));
  CHECK_THROWS(Fault::usage, "it alone", run({}, {.side = Side::decode, .stall_ns = second}, &compute));
  CHECK_THROWS(Fault::usage, "every leg", run({{1, {{0}}}}, good, &compute));
  CHECK_THROWS(Fault::usage, "every leg", run({{units + 1, {{0}, {0}}}}, good, &compute));
  CHECK_THROWS(Fault::usage, "every leg", run({{2, {{0}, {0}}}, {1, {{1}, {1}}}}, good, &compute));
  CHECK_THROWS(Fault::usage, "a loop needs requests", run_pipeline(script, {}, {}, {}, &compute, good));
}

}  // namespace
}  // namespace kvxfer::test
