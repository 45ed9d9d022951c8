// A context that behaves as another one does, until a double changes a part of it.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <string>

#include "backend/backend.h"
#include "backend/registry.h"

namespace kvxfer::test {

class Decorated : public Context {
 public:
  explicit Decorated(std::unique_ptr<Context> inner) : capabilities_(inner->capabilities()), inner_(std::move(inner)) {}

  const Capabilities& capabilities() const override { return capabilities_; }
  Region allocate(std::uint64_t bytes, MemoryKind kind, int numa) override {
    return inner_->allocate(bytes, kind, numa);
  }
  Region register_memory(std::byte* address, std::uint64_t bytes, MemoryKind kind) override {
    return inner_->register_memory(address, bytes, kind);
  }
  std::string listen(const std::string& address, std::uint16_t port) override { return inner_->listen(address, port); }
  std::shared_ptr<Peer> accept(Deadline deadline) override {
    accepted_ = true;
    return inner_->accept(deadline);
  }
  std::shared_ptr<Peer> connect(const std::string& endpoint, Deadline deadline) override {
    return inner_->connect(endpoint, deadline);
  }
  std::string export_keys(std::span<const Region> regions) override { return inner_->export_keys(regions); }
  std::shared_ptr<Plan> prepare(Peer& peer, const PlanArrays& arrays, Deadline deadline) override {
    return inner_->prepare(peer, arrays, deadline);
  }
  void arm(Plan& plan, Op op, std::span<const std::uint32_t> segments, std::uint64_t tag) override {
    inner_->arm(plan, op, segments, tag);
  }
  void post(Plan& plan, Op op, std::span<const std::uint32_t> segments, std::uint64_t tag,
            const ReadyFlag* ready) override {
    inner_->post(plan, op, segments, tag, ready);
  }
  void release(Peer& peer, std::uint64_t tag) override { inner_->release(peer, tag); }
  bool cancel(Peer& peer, std::uint64_t tag) override { return inner_->cancel(peer, tag); }
  std::size_t poll(std::span<Event> events, Deadline deadline) override;
  void put_back(std::span<const Event> events) override { given_.insert(given_.begin(), events.begin(), events.end()); }
  void progress(Deadline deadline) override;
  int event_fd() override { return inner_->event_fd(); }
  std::uint64_t bytes_moved() const override { return inner_->bytes_moved(); }
  void close() noexcept override {
    closed_ = true;
    inner_->close();
  }

 protected:
  // What the double does whenever it is polled.
  virtual void step() {}
  // What becomes of an event of the inner context: by default it is given to the application.
  virtual void take(const Event& event) { give(event); }
  void give(const Event& event) { given_.push_back(event); }

  Capabilities capabilities_;
  bool accepted_ = false;  // this side listened: in these tests the one that bytes go to
  const std::unique_ptr<Context> inner_;

 private:
  std::deque<Event> given_;
  std::atomic<bool> closed_{false};
};

}  // namespace kvxfer::test
