#include "tests/doubles/doubles.h"

#include <algorithm>
#include <list>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "backend/skeleton/skeleton.h"
#include "tests/doubles/decorated.h"
#include "tests/pair.h"

namespace kvxfer::test {

namespace {

std::unique_ptr<Context> real(const char* backend = "tcp") {
  return find_backend(backend).open(token, backend == std::string("tcp") ? Options{{"connections", 1}} : Options{});
}

// The passive side says armed twice over the inner context: in arm(), and in the first poll after it. Only the second
// one opens the gate before the initiator's push, and only when that side polls too.
class TwoSided final : public Decorated {
 public:
  TwoSided() : Decorated(real()) {
    capabilities_.needs_arm = true;
    capabilities_.one_sided = false;
    capabilities_.pull = false;
  }
  ~TwoSided() override { TwoSided::close(); }  // its threads look at the gates

  void claim_one_sided() { capabilities_.one_sided = true; }
  void claim_no_arm() { capabilities_.needs_arm = false; }

  void arm(Plan& plan, Op op, std::span<const std::uint32_t> segments, std::uint64_t tag) override {
    Decorated::arm(plan, op, segments, tag);
    armed_here_.emplace_back(&plan, op, tag);
  }

  void post(Plan& plan, Op op, std::span<const std::uint32_t> segments, std::uint64_t tag,
            const ReadyFlag* ready) override {
    if (op == Op::pull) throw Error(Fault::usage, "this backend has no pull");
    const Key key{plan.peer_id(), tag};
    const auto waiting = [&](const Push& push) { return push.key == key; };
    if (!armed_.contains(key) && std::ranges::none_of(pushes_, waiting))
      throw Error(Fault::usage, "tag " + std::to_string(tag) + " was not armed by the other side");
    pushes_.emplace_back(key, ready);
    try {
      Decorated::post(plan, op, segments, tag, &pushes_.back().gate);
    } catch (...) {
      pushes_.pop_back();
      throw;
    }
    armed_.erase(key);
  }

 protected:
  void step() override {
    for (const auto& [plan, op, tag] : armed_here_) try {
        inner_->arm(*plan, op, {}, tag);
      } catch (const Error&) {  // lost by now
      }
    armed_here_.clear();
    for (Push& push : pushes_)
      if (granted_.contains(push.key) && (push.ready == nullptr || push.ready->load() != 0)) push.gate = 1;
  }

  void take(const Event& event) override {
    const Key key{event.peer, event.tag};
    if (event.kind == EventKind::armed && half_armed_.erase(key) > 0) {
      granted_.insert(key);
      return;
    }
    if (event.kind == EventKind::armed) {
      half_armed_.insert(key);
      armed_.insert(key);
    }
    if (event.kind == EventKind::confirmed || event.kind == EventKind::cancelled || event.kind == EventKind::error) {
      std::erase_if(pushes_, [&](const Push& push) { return push.key == key; });
      granted_.erase(key);
    }
    give(event);
  }

 private:
  using Key = std::pair<std::uint32_t, std::uint64_t>;  // peer and tag
  struct Push {
    Key key;
    const ReadyFlag* ready;
    ReadyFlag gate{0};
    Push(Key of, const ReadyFlag* flag) : key(of), ready(flag) {}
  };

  std::vector<std::tuple<Plan*, Op, std::uint64_t>> armed_here_;  // and not yet granted
  std::set<Key> half_armed_, armed_, granted_;
  std::list<Push> pushes_;
};

// What is posted is handed on after the delay; meanwhile this side says what it likes.
class Late final : public Decorated {
 public:
  explicit Late(EventKind says) : Decorated(real()), says_(says) {}

  void post(Plan& plan, Op op, std::span<const std::uint32_t> segments, std::uint64_t tag,
            const ReadyFlag* ready) override {
    posts_.push_back({now_ns() + delay, &plan, op, {segments.begin(), segments.end()}, tag, ready});
    give({tag, says_, plan.peer_id(), now_ns()});
  }

 protected:
  void step() override {
    while (!posts_.empty() && posts_.front().at <= now_ns()) {
      const Posted post = posts_.front();
      posts_.pop_front();
      inner_->post(*post.plan, post.op, post.segments, post.tag, post.ready);
    }
  }
  void take(const Event& event) override {
    if (event.kind != says_) give(event);
  }

 private:
  struct Posted {
    Nanoseconds at;
    Plan* plan;
    Op op;
    std::vector<std::uint32_t> segments;
    std::uint64_t tag;
    const ReadyFlag* ready;
  };
  const EventKind says_;
  std::deque<Posted> posts_;
};

class Swapped final : public Decorated {
 public:
  Swapped() : Decorated(real()) {}

  std::shared_ptr<Plan> prepare(Peer& peer, const PlanArrays& arrays, Deadline deadline) override {
    const auto& lengths = arrays.lengths;
    for (std::size_t i = 0; i < lengths.size(); ++i)
      for (std::size_t j = i + 1; j < lengths.size(); ++j)
        if (lengths[i] == lengths[j] && lengths[i] > 0) return prepare_swapped(peer, arrays, i, j, deadline);
    return Decorated::prepare(peer, arrays, deadline);
  }

 private:
  // Where the bytes come from: local to the side that connects, remote to the one that listens.
  std::shared_ptr<Plan> prepare_swapped(Peer& peer, PlanArrays arrays, std::size_t i, std::size_t j,
                                        Deadline deadline) {
    auto& from_regions = accepted_ ? arrays.remote_regions : arrays.local_regions;
    auto& from_offsets = accepted_ ? arrays.remote_offsets : arrays.local_offsets;
    std::vector<std::uint32_t> regions(from_regions.begin(), from_regions.end());
    std::vector<std::uint64_t> offsets(from_offsets.begin(), from_offsets.end());
    std::swap(regions[i], regions[j]);
    std::swap(offsets[i], offsets[j]);
    from_regions = regions;
    from_offsets = offsets;
    return Decorated::prepare(peer, arrays, deadline);
  }
};

class Flipped final : public Decorated {
 public:
  Flipped() : Decorated(real()) {}

  Region allocate(std::uint64_t bytes, MemoryKind kind, int numa) override {
    return regions_.emplace_back(Decorated::allocate(bytes, kind, numa));
  }
  std::shared_ptr<Plan> prepare(Peer& peer, const PlanArrays& arrays, Deadline deadline) override {
    if (!arrays.lengths.empty() && arrays.lengths[0] > 0)
      victim_ = regions_[arrays.local_regions[0]].address + arrays.local_offsets[0] + arrays.lengths[0] - 1;
    return Decorated::prepare(peer, arrays, deadline);
  }

 protected:
  void take(const Event& event) override {
    const bool arrived = event.kind == EventKind::delivered || event.kind == EventKind::confirmed;
    if (accepted_ && arrived && victim_ != nullptr) *victim_ ^= std::byte{0x10};
    give(event);
  }

 private:
  std::vector<Region> regions_;
  std::byte* victim_ = nullptr;
};

class Dying final : public Decorated {
 public:
  Dying() : Decorated(real()) {}

 protected:
  void step() override {
    if (accepted_ && bytes_moved() >= last_words) close();
  }
};

class Silent final : public Decorated {
 public:
  Silent() : Decorated(real()) {}
  void arm(Plan&, Op, std::span<const std::uint32_t>, std::uint64_t) override {}
  void post(Plan&, Op, std::span<const std::uint32_t>, std::uint64_t, const ReadyFlag*) override {}
};

enum class Garbage : std::uint8_t { wild, strangers, twice };

class Babbling final : public Decorated {
 public:
  explicit Babbling(Garbage garbage) : Decorated(real()), garbage_(garbage) {}

 protected:
  void step() override {
    if (garbage_ == Garbage::strangers) give({1, EventKind::confirmed, 77, now_ns()});
    if (garbage_ != Garbage::wild) return;
    const auto number = [this] { return static_cast<std::uint32_t>(random_()); };
    give({number(), static_cast<EventKind>(number() % 250), number() % 2, static_cast<Nanoseconds>(number())});
  }
  void take(const Event& event) override {
    for (int i = 0; garbage_ == Garbage::twice && i < 2; ++i) give(event);
  }

 private:
  const Garbage garbage_;
  std::mt19937 random_{4};
};

// Says of a context what `change` makes of its capabilities.
class Boasting final : public Decorated {
 public:
  template <typename Change>
  Boasting(std::unique_ptr<Context> inner, const Change& change) : Decorated(std::move(inner)) {
    change(capabilities_);
  }
};

class OwnMemory final : public Decorated {
 public:
  OwnMemory() : Decorated(real()) {}
  Region register_memory(std::byte*, std::uint64_t, MemoryKind) override {
    throw Error(Fault::usage, "this backend moves memory of its own only");
  }
};

}  // namespace

std::unique_ptr<Context> two_sided() { return std::make_unique<TwoSided>(); }
std::unique_ptr<Context> local_before_delivery() { return std::make_unique<Late>(EventKind::local); }
std::unique_ptr<Context> confirmed_before_delivery() { return std::make_unique<Late>(EventKind::confirmed); }
std::unique_ptr<Context> two_pieces_swapped() { return std::make_unique<Swapped>(); }
std::unique_ptr<Context> one_byte_flipped() { return std::make_unique<Flipped>(); }
std::unique_ptr<Context> dies_after_bytes() { return std::make_unique<Dying>(); }
std::unique_ptr<Context> never_answers() { return std::make_unique<Silent>(); }
std::unique_ptr<Context> answers_garbage() { return std::make_unique<Babbling>(Garbage::wild); }
std::unique_ptr<Context> answers_of_strangers() { return std::make_unique<Babbling>(Garbage::strangers); }
std::unique_ptr<Context> says_everything_twice() { return std::make_unique<Babbling>(Garbage::twice); }
std::unique_ptr<Context> claims_more_inflight() {
  return std::make_unique<Boasting>(real(), [](Capabilities& can) { can.max_inflight *= 2; });
}
std::unique_ptr<Context> claims_pull() {
  return std::make_unique<Boasting>(skeleton::open(token, {}), [](Capabilities& can) { can.pull = true; });
}
std::unique_ptr<Context> claims_one_sided() {
  auto context = std::make_unique<TwoSided>();
  context->claim_one_sided();
  return context;
}
std::unique_ptr<Context> claims_no_arm() {
  auto context = std::make_unique<TwoSided>();
  context->claim_no_arm();
  return context;
}
std::unique_ptr<Context> claims_any_memory() { return std::make_unique<OwnMemory>(); }
std::unique_ptr<Context> claims_to_move_data() {
  return std::make_unique<Boasting>(real("null"), [](Capabilities& can) { can.moves_data = true; });
}

}  // namespace kvxfer::test
