// Memory is refused at each place once: an allocation fails, everything before and after it is granted. Whatever a
// backend was doing ends with an error on the side where it happened, and everything can be closed and destroyed.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <exception>
#include <new>
#include <system_error>

#include "tests/allocations.h"
#include "tests/check.h"
#include "tests/pair.h"

namespace kvxfer::test {
namespace {

constexpr std::size_t region_bytes = 64 << 10;
constexpr unsigned seconds_per_life = 60;  // as a case has otherwise
constexpr std::uint64_t ucx_apart = 11;    // a life has a thousand, most of them alike, and ends after seconds

// Runs both; the one that fails closes both contexts, which wakes the other one.
template <typename A, typename B>
void both(Context& a, Context& b, const A& of_a, const B& of_b) {
  const auto guarded = [&](const auto& body) {
    try {
      body();
    } catch (const std::system_error&) {
      throw Failure("a system_error where an Error belongs");
    } catch (...) {
      a.close();
      b.close();
      throw;
    }
  };
  try {
    together([&] { guarded(of_a); }, [&] { guarded(of_b); });
  } catch (const std::system_error&) {  // no memory for the test's own thread
    throw std::bad_alloc();
  }
}

// Keeps what comes before it, but for the end of a transfer or of the peer: that throws.
void wait_or_throw(End& end, EventKind kind, std::uint64_t tag) {
  for (;;) {
    const auto wanted = std::ranges::find_if(end.seen, [&](const Event& e) { return e.kind == kind && e.tag == tag; });
    if (wanted != end.seen.end()) {
      end.seen.erase(wanted);
      return;
    }
    std::array<Event, 1> event;
    const Deadline deadline = soon();
    if (end.context->poll(event, deadline) == 0) {
      if (deadline.passed()) throw Failure("nothing came");
      throw Error(Fault::peer_lost, "closed by the other side, which failed");
    }
    if (event[0].kind == EventKind::error || event[0].kind == EventKind::peer_lost)
      throw Error(Fault::peer_lost, "lost");
    end.seen.push_back(event[0]);
  }
}

void whole_life(const std::string& backend) {
  End a, b;
  for (End* side : {&a, &b}) {
    side->context = find_backend(backend).open(token, {});
    side->region = side->context->allocate(region_bytes, MemoryKind::host, -1);
  }
  const std::string endpoint = b.context->listen("127.0.0.1", 0);
  both(
      *a.context, *b.context, [&] { a.peer = a.context->connect(endpoint, soon()); },
      [&] { b.peer = b.context->accept(soon()); });
  a.peer->import_keys(b.context->export_keys({&b.region, 1}));
  b.peer->import_keys(a.context->export_keys({&a.region, 1}));
  PlanPieces pieces;
  for (std::uint64_t i = 0; i < 8; ++i) pieces.add(i * 2048, i * 4096, 1024);
  std::shared_ptr<Plan> of_a, of_b;
  both(*a.context, *b.context, [&] { of_a = a.prepare(pieces); }, [&] { of_b = b.prepare(pieces.mirrored()); });
  both(
      *a.context, *b.context,
      [&] {
        wait_or_throw(a, EventKind::armed, 1);
        a.context->post(*of_a, Op::push, {}, 1, nullptr);
        wait_or_throw(a, EventKind::confirmed, 1);
        a.context->arm(*of_a, Op::pull, {}, 2);
        wait_or_throw(a, EventKind::delivered, 2);
      },
      [&] {
        b.context->arm(*of_b, Op::push, {}, 1);
        wait_or_throw(b, EventKind::delivered, 1);
        wait_or_throw(b, EventKind::armed, 2);
        b.context->post(*of_b, Op::pull, {}, 2, nullptr);
        wait_or_throw(b, EventKind::confirmed, 2);
      });
  a.context->close();
  b.context->close();
}

// How many allocations of a whole life were refused, one in each of so many lives; every so many-th of its allocations.
std::uint64_t refuse_each(const std::string& backend, Refused which, std::uint64_t apart) {
  for (std::uint64_t lives = 0;; ++lives) {
    ::alarm(seconds_per_life);
    refuse_allocation(1 + lives * apart, which);
    try {
      whole_life(backend);
    } catch (const Failure&) {
      refuse_allocation(0);
      throw;
    } catch (const Error& error) {
      const bool closed = std::string(error.what()) == "the context is closed";  // by the other side, which failed
      if (!closed && error.fault() != Fault::unavailable && error.fault() != Fault::peer_lost) throw;
    } catch (const std::bad_alloc&) {
    }
    const bool refused = refuse_allocation(0);
    if (!refused) return lives;
  }
}

}  // namespace

TEST(memory, refused_at_each_place_of_every_backend) {
  for (const BackendRow& entry : backends()) {
    if (!entry.probe().available || std::string(entry.name) == "ucx") continue;
    const auto context = entry.open(token, {});
    if (!context->capabilities().moves_data) continue;
    CHECK(refuse_each(entry.name, Refused::any, 1) > 20);
  }
}

// UCX itself ends the process where it is refused memory. It allocates as C does, and what is ours of ucx as C++ does.
TEST(memory, refused_at_places_of_what_is_ours_of_ucx) {
  if (!find_backend("ucx").probe().available) return;
  const std::uint64_t apart = std::getenv("KVXFER_EVERY_FAULT") == nullptr ? ucx_apart : 1;
  CHECK(refuse_each("ucx", Refused::by_new, apart) > 20);
}

}  // namespace kvxfer::test
