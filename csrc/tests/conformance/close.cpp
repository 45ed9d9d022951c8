// close(): at any time, from any thread, any number of times.
#include <algorithm>
#include <atomic>
#include <thread>

#include "tests/conformance/rig.h"

namespace kvxfer::test {
namespace {

constexpr std::uint64_t bytes = std::uint64_t{sanitized ? 4 : 32} << 20;

// How far the two sides have come when one of them closes.
enum class State : std::uint8_t {
  opened,
  listening,
  joined,
  keyed,
  prepared,
  armed,
  posted,
  moving,
  confirmed,
  released
};
constexpr State last_state = State::released;

struct Run {
  const Subject& subject;
  Op op;
  ReadyFlag ready{0};  // outlives the contexts
  End a, b;
  Plans plans;

  Run(const Subject& of, Op operation, State state) : subject(of), op(operation) {
    for (End* side : {&a, &b}) {
      side->context = subject.open();
      side->allocate(bytes);
    }
    for (int s = 1; s <= static_cast<int>(state); ++s) enter(static_cast<State>(s));
  }
  End& initiator() { return op == Op::push ? a : b; }
  End& passive() { return op == Op::push ? b : a; }
  Plan& of_initiator() const { return op == Op::push ? *plans.first : *plans.second; }
  Plan& of_passive() const { return op == Op::push ? *plans.second : *plans.first; }

 private:
  std::string endpoint_;

  void enter(State state) {
    switch (state) {
      case State::opened:
        return;
      case State::listening:
        endpoint_ = b.context->listen("127.0.0.1", 0);
        return;
      case State::joined:
        return together([&] { a.peer = a.context->connect(endpoint_, soon()); },
                        [&] { b.peer = b.context->accept(soon()); });
      case State::keyed:
        a.peer->import_keys(b.context->export_keys(b.regions));
        b.peer->import_keys(a.context->export_keys(a.regions));
        return;
      case State::prepared:
        return together([&] { plans.first = a.prepare(one_piece(bytes)); },
                        [&] { plans.second = b.prepare(one_piece(bytes)); });
      case State::armed:
        passive().context->arm(of_passive(), op, {}, 1);
        return wait(initiator(), EventKind::armed);
      case State::posted:  // a push is held where there is a flag that can hold it
        return initiator().context->post(of_initiator(), op, {}, 1, op == Op::push ? &ready : nullptr);
      case State::moving: {
        ready = 1;
        const Deadline deadline = soon();
        while (subject.can.moves_data && initiator().context->bytes_moved() == 0 && !deadline.passed()) {
          passive().collect(Deadline(0));
          initiator().collect(Deadline(0));
        }
        return;
      }
      case State::confirmed:
        wait(initiator(), EventKind::confirmed);
        return wait(passive(), EventKind::delivered);
      case State::released:
        b.context->release(*b.peer, 1);
        return wait(a, EventKind::released);
    }
  }
  void wait(End& side, EventKind kind) {
    const Deadline deadline = soon();
    while (!side.take(kind, 1)) {
      if (deadline.passed()) throw Failure(std::string(name_of(kind)) + " did not come");
      (&side == &a ? b : a).collect(Deadline(0));
      side.collect(Deadline::after(1'000'000));
    }
  }
};

// What a context says once it is closed.
void require_closed(Run& run, End& side) {
  Context& context = *side.context;
  CHECK_THROWS(Fault::usage, "closed", context.allocate(8, MemoryKind::host, -1));
  CHECK_THROWS(Fault::usage, "closed", context.register_memory(side.at(0), 8, MemoryKind::host));
  CHECK_THROWS(Fault::usage, "closed", context.listen("127.0.0.1", 0));
  CHECK_THROWS(Fault::usage, "closed", context.accept(soon()));
  CHECK_THROWS(Fault::usage, "closed", context.connect("127.0.0.1:1", soon()));
  const Nanoseconds began = now_ns();
  const Deadline deadline = soon();
  do {
    side.collect(soon());  // gives what there was, and waits no more
  } while (side.context->event_fd() >= 0 && now_ns() - began < 2'000'000);
  CHECK(!deadline.passed());
  if (side.peer) {
    CHECK(!side.peer->lost().empty());
    CHECK_THROWS(Fault::peer_lost, "", context.release(*side.peer, 1));
    CHECK(!context.cancel(*side.peer, 1));
  }
  if (run.plans.first) {
    Plan& plan = &side == &run.a ? *run.plans.first : *run.plans.second;
    CHECK_THROWS(Fault::peer_lost, "", side.prepare(one_piece(8)));
    CHECK_THROWS(Fault::peer_lost, "", context.arm(plan, run.op, {}, 2));
    if (!run.subject.can.needs_arm) CHECK_THROWS(Fault::peer_lost, "", context.post(plan, run.op, {}, 2, nullptr));
  }
}

// After peer_lost no open transfer stays without its end; that of a passive side may have ended in nothing at all.
void require_one_end(const End& side, bool posted_here) {
  const std::size_t ends = count(side.seen, EventKind::confirmed, 1) + count(side.seen, EventKind::delivered, 1) +
                           count(side.seen, EventKind::cancelled, 1) + count(side.seen, EventKind::error, 1);
  CHECK(ends <= 1);
  if (posted_here) CHECK_EQ(ends, 1U);
}

CHECK_BACKEND(close, in_every_state, all) {
  for (const Op op : subject.ops())
    for (int s = 0; s <= static_cast<int>(last_state); ++s)
      for (const bool a_closes : {false, true}) {
        const auto state = static_cast<State>(s);
        Run run(subject, op, state);
        End& closes = a_closes ? run.a : run.b;
        End& stays = a_closes ? run.b : run.a;
        closes.context->close();
        if (stays.peer) {
          stays.wait(EventKind::peer_lost, 0);
          stays.drain(5'000'000).swap(stays.seen);
          CHECK(!stays.peer->lost().empty());
          CHECK_THROWS(Fault::peer_lost, stays.peer->lost(), stays.context->release(*stays.peer, 1));
          CHECK_EQ(count(stays.seen, EventKind::peer_lost, 0), 0U);  // told once
        }
        require_closed(run, closes);
        if (state == State::posted || state == State::moving) {
          require_one_end(stays, &stays == &run.initiator());
          require_one_end(closes, &closes == &run.initiator());
        }
        closes.context->close();
        stays.context->close();
        require_closed(run, stays);
      }
}

// Whoever has closed may use the memory for something else: a byte of each page is given another value as soon as
// close() returns, and the other side has ended before they are looked at.
CHECK_BACKEND(close, nothing_is_written_afterwards, moves) {
  if (!order_is_seen_across_sides) return;
  constexpr std::uint64_t size = std::uint64_t{4} << 20, page = 4096;
  for (const Op op : subject.ops())
    for (int round = 0; round < 24; ++round) {
      Rig rig(subject, {size});
      const auto plans = rig.prepare(one_piece(size));
      for (std::uint64_t tag = 1; tag <= std::min(subject.can.max_inflight, 16U); ++tag) rig.post(plans, op, tag);
      const Deadline deadline = soon();
      while (rig.initiator(op).context->bytes_moved() == 0 && !deadline.passed()) {
        rig.passive(op).collect(Deadline(0));
        rig.initiator(op).collect(Deadline(0));
      }
      std::jthread first;  // in every third round the other side closes first
      if (round % 3 == 2) first = std::jthread([&] { rig.a.context->close(); });
      if (round % 3 == 2) rig.b.wait(EventKind::peer_lost, 0);
      rig.b.context->close();
      for (std::uint64_t at = 0; at < size; at += page) *rig.b.at(at) = ~*rig.a.at(at);
      if (round % 3 != 2) rig.a.wait(EventKind::peer_lost, 0);
      rig.a.context->close();
      std::uint64_t written = 0;
      for (std::uint64_t at = 0; at < size; at += page) written += *rig.b.at(at) == ~*rig.a.at(at) ? 0 : 1;
      if (written > 0) throw Failure(std::to_string(written) + " pages were written after close() had returned");
    }
}

CHECK_BACKEND(close, from_two_threads_at_once_while_bytes_move, all) {
  for (const Op op : subject.ops())
    for (int round = 0; round < 8; ++round) {
      Run run(subject, op, State::posted);
      run.ready = 1;
      together([&] { run.a.context->close(); }, [&] { (round % 2 == 0 ? run.a : run.b).context->close(); });
      run.b.context->close();
    }
}

CHECK_BACKEND(close, destroys_in_either_order_without_being_called, all) {
  for (const Op op : subject.ops())
    for (const bool a_first : {false, true}) {
      Run run(subject, op, State::posted);
      run.ready = 1;
      run.plans = {};
      (a_first ? run.a : run.b).peer.reset();
      (a_first ? run.a : run.b).context.reset();
    }
}

// Another thread closes; whether it comes before the wait or into it must make no difference but for the words.
template <typename Wait>
void require_ended_by_close(Context& context, const Wait& wait) {
  const Nanoseconds began = now_ns();
  std::atomic<bool> begun{false};
  together(
      [&] {
        begun = true;
        wait();
      },
      [&] {
        while (!begun) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        context.close();
      });
  if (now_ns() - began >= patience / 2) throw Failure("close() did not end the wait of another thread");
}

// Throws Error, whatever it says.
template <typename Body>
void require_error(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    CHECK(error.fault() == Fault::peer_lost || error.fault() == Fault::usage);
    return;
  }
  throw Failure("a wait that close() ended threw nothing");
}

CHECK_BACKEND(close, ends_accept_in_another_thread, all) {
  const auto context = subject.open();
  context->listen("127.0.0.1", 0);
  require_ended_by_close(*context, [&] { require_error([&] { context->accept(soon()); }); });
}

CHECK_BACKEND(close, ends_connect_in_another_thread, all) {
  const auto listens = subject.open();
  const std::string endpoint = listens->listen("127.0.0.1", 0);  // and never accepts
  const auto context = subject.open();
  require_ended_by_close(*context, [&] { require_error([&] { context->connect(endpoint, soon()); }); });
}

CHECK_BACKEND(close, ends_prepare_in_another_thread, all) {
  Rig rig(subject, {4096});
  require_ended_by_close(*rig.a.context, [&] { require_error([&] { rig.a.prepare(one_piece(8)); }); });
}

CHECK_BACKEND(close, ends_poll_in_another_thread, all) {
  Rig rig(subject, {4096});
  Event event;
  require_ended_by_close(*rig.a.context, [&] { CHECK_EQ(rig.a.context->poll({&event, 1}, soon()), 0U); });
  const auto alone = subject.open();
  require_ended_by_close(*alone, [&] { CHECK_EQ(alone->poll({&event, 1}, soon()), 0U); });
}

CHECK_BACKEND(close, frees_the_endpoint, all) {
  const auto first = subject.open();
  const std::string endpoint = first->listen("127.0.0.1", 0);
  first->close();
  const auto client = subject.open();
  CHECK_THROWS(Fault::peer_lost, "", client->connect(endpoint, soon()));
}

}  // namespace
}  // namespace kvxfer::test
