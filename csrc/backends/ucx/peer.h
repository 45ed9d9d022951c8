// One peer of a ucx context: an endpoint for each of its lanes of UCX, each with a thread that alone uses it.
//
//   push                pieces are put there;  flush;  written →                     ← confirm
//   pull, by get        pieces are got here;            delivered →
//   pull, by put        request →    pieces are put here by the other side;  flush  ← written;  delivered →
//
// Over tcp UCX makes a get of messages that its target has to answer, so there the target does better to put. Notices
// go as messages over the first endpoint, in order; lane 0 carries what precedes the first of them, and its end tells
// that the peer has gone when UCX does not.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "backend/lane_peer.h"
#include "backends/ucx/endpoint.h"
#include "backends/ucx/memory.h"
#include "backends/ucx/patience.h"

namespace kvxfer::ucx {

enum class Pull : std::uint8_t { by_transport = 0, get = 1, put = 2 };

struct Settings {
  std::uint32_t endpoints = 1;
  Errors errors = Errors::peer;
  Pull pull = Pull::by_transport;
  std::uint32_t window = 128;  // requests under way per endpoint
  // How long a thread that waits asks UCX again, at most, before it sleeps; within a host. Over a link of 5 Gbit/s it
  // would triple the CPU time.
  Nanoseconds asking = 50'000;
  std::uint16_t data_port = 0;  // where lane 0 came in, if that was asked for: listeners use those that follow it
};

class UcxPeer final : public LanePeer {
 public:
  // `lanes`: one.
  UcxPeer(EventQueue& events, std::uint32_t id, std::vector<Socket> lanes, std::shared_ptr<UcpContext> context,
          Settings settings);
  ~UcxPeer() override;

  void import_keys(const std::string& keys) override;
  void wire_up(bool first, Deadline deadline) override;
  void start() override;
  std::shared_ptr<LanePlan> prepare(const PlanArrays& arrays, std::span<const Region> regions,
                                    Deadline deadline) override;
  void post(LanePlan& plan, Op op, std::span<const std::uint32_t> segments, std::uint64_t tag,
            const ReadyFlag* ready) override;
  bool cancel(std::uint64_t tag) override;
  // How a pull of this side moves bytes: the other side puts them, when asked; or this side gets them.
  bool pulls_by_put() const;
  std::string protocols() const;  // how this side has moved pieces, such as "put zero-copy"; "" while it has not
  bool wired_up() const;          // one that is not is asked nothing else
  std::vector<std::string> describe() const override;
  std::uint64_t bytes_moved() const override { return bytes_moved_.load(std::memory_order_relaxed); }

 protected:
  void send(const Notice& notice, const void* payload, int descriptor) override;
  std::string handle(const Notice& notice, std::span<const std::uint32_t> segments) override;
  std::byte* locate(const RegionKey& key, Deadline) override { return reinterpret_cast<std::byte*>(key.place); }
  void end_open_transfers() override;
  void let_go(Parting parting) noexcept override;
  void say_bye() noexcept override;
  void await_peer() noexcept override;

 private:
  struct Mover;
  struct Transfer;

  // What one endpoint has under way of a transfer.
  struct Part {
    Transfer* transfer = nullptr;
    Mover* mover = nullptr;
    std::uint32_t outstanding = 0;
    bool open = false;  // in Mover::touched
    bool flushing = false;
    bool flushed = false;
  };

  // One piece that UCX has.
  struct Request {
    Part* part = nullptr;
    std::uint64_t bytes = 0;
    bool asked_about = false;
  };

  // Pieces that UCX moves in one way; no request of ours has more of them than this, or the others go as those do.
  static constexpr std::size_t most_kinds = 16;
  struct Kind {
    bool gets = false;
    std::uint64_t bytes = 0;
    MemoryKind memory = MemoryKind::host;  // this side's
    bool operator==(const Kind&) const = default;
  };

  enum class Role : std::uint8_t { move, ask };  // whose pieces this side moves; which it asks the other side to move

  struct Transfer {
    bool open = false;
    bool mine = false;  // posted here
    Role role = Role::move;
    bool cancelling = false;
    bool copied = false;  // every byte; the other side is being told
    bool lost = false;    // with its peer: it ends once nothing of it is under way
    Op op = Op::push;
    std::uint64_t tag = 0;
    LanePlan* plan = nullptr;
    const ReadyFlag* ready = nullptr;
    std::vector<Range> left;  // to hand to endpoints
    std::size_t next_left = 0;
    std::uint64_t chunk_bytes = 0;
    std::uint64_t total = 0;
    std::atomic<std::uint64_t> done{0};  // bytes that UCX is done with
    std::uint64_t told = 0;
    Nanoseconds told_at = 0;
    std::uint32_t parts_open = 0;         // endpoints that have something of it under way
    std::atomic<bool> handed_out{false};  // nothing is left
    std::span<Part> parts;                // one for each endpoint

    bool gets() const { return mine && op == Op::pull; }
  };

  struct Message {
    UcxPeer* peer = nullptr;
    Notice notice;
    std::vector<std::uint32_t> segments;
  };

  struct RemotePool {
    std::uint64_t address = 0;
    std::uint64_t bytes = 0;
    ucp_rkey_h key = nullptr;
  };

  // An endpoint with what its thread alone uses, unless said otherwise.
  struct Mover {
    UcxPeer& peer;
    const std::size_t number;
    Endpoint endpoint;
    std::vector<Pool> local;
    std::vector<RemotePool> remote;
    std::size_t last_local = 0, last_remote = 0;
    ucp_request_param_t put_param{}, flush_param{};
    std::uint32_t outstanding = 0;
    std::vector<Request> requests;  // as many as may be under way
    std::vector<Request*> unused;
    Nanoseconds looked_at = 0;  // when tell_progress() last did
    Patience patience;
    Part* part = nullptr;  // whose chunk is being handed to UCX
    Range chunk;
    std::vector<iovec> here, there;
    std::size_t pieces = 0, next_piece = 0;
    std::vector<Part*> touched;  // with something under way
    bool hungry = false;         // there may be chunks to take
    std::string broken;          // why the peer must be given up
    std::optional<Parting> parting;
    std::atomic<bool> attention{false};    // what is under mutex_ has news for it
    std::function<void()>* job = nullptr;  // under mutex_
    bool ended = false;                    // under mutex_: it moves nothing any more
    bool gone = false;                     // under mutex_: nor can the other side reach it
    std::string transport;                 // of its lanes
    std::vector<Kind> kinds;               // about which UCX was asked
    std::string carried, how;              // under mutex_: what it said, of transports and of protocols

    Mover(UcxPeer& of, std::size_t its_number, std::uint64_t client_id);
  };

  struct Outcome {
    std::optional<Notice> notice;
    std::optional<EventKind> event;
    std::uint64_t tag = 0;
  };

  void listen_for_endpoints(Deadline deadline);
  std::uint16_t listen_from(unsigned first, const sockaddr_storage& host, Endpoint& endpoint,
                            std::uint64_t client_id) const;
  void connect_endpoints(Deadline deadline);
  void flush_endpoints(Deadline deadline);
  void say_ready();
  void destroy_endpoints();
  void make_movers(const std::vector<std::uint64_t>& client_ids);
  void progress_until(const std::function<bool()>& done, Deadline deadline);
  void receive_wire_up(void* into, std::size_t bytes, Deadline deadline);
  void on_thread_of(Mover& mover, std::function<void()> job);

  // On the mover's thread:
  void move(Mover& mover);
  std::optional<Parting> move_until_parting(Mover& mover);
  void listen_to_others(Mover& mover);
  bool hand_to_ucx(Mover& mover, bool& waits_for_ready);
  void hand_over_piece(Mover& mover, const iovec& here, const iovec& there);
  static bool asks_about(Mover& mover, Kind kind);
  void learn_how(Mover& mover, bool gets, void* handle) noexcept;
  bool take_chunk(Mover& mover, bool& waits_for_ready);
  bool finish_parts(Mover& mover);
  void flush(Mover& mover, Part& part);
  void part_done(Part& part);
  void moved(Part& part, std::uint64_t bytes);
  void tell_progress(Mover& mover);
  bool send_messages(Mover& mover);
  void send_message(Mover& mover, Message& message);
  void part_in_order(Mover& mover);
  template <typename Done>
  void progress_mover(Mover& mover, const Done& done, Deadline deadline);
  void end(Mover& mover);
  void mark_ended(Mover& mover, bool gone);
  void set_notices_over();
  static void on_moved(void* handle, ucs_status_t status, void* request);
  static void on_flushed(void* request, ucs_status_t status, void* part);
  static void on_sent(void* request, ucs_status_t status, void* message);
  static void on_message(void* first, std::span<const std::byte> notice, std::span<const std::byte> segments);
  std::string take_message(std::span<const std::byte> head, std::span<const std::byte> rest);

  void perform(const Outcome& outcome);
  std::string was_asked(const Notice& notice, std::span<const std::uint32_t> segments);
  std::string was_written(const Notice& notice);
  std::string was_answered(const Notice& notice);

  // With mutex_ held:
  Transfer* find(bool mine, Op op, std::uint64_t tag);
  Transfer* open_transfer(LanePlan& plan, bool mine, Op op, Role role, std::uint64_t tag);
  void queue(Transfer& transfer);
  Outcome settle(Transfer& transfer);
  Outcome stop(Transfer& transfer);
  void end_in_error();
  static Notice about(Transfer& transfer, NoticeKind kind);
  bool all_ended() const;
  bool all_gone() const;

  void add_messages();                                                // with messages_mutex_ held
  bool enqueue(const Notice& notice, const std::uint32_t* segments);  // false: there is no room

  // From any thread:
  Mover* own_mover() const;  // whose thread this is; nothing on others
  void alert(Mover& mover);
  void alert_all();  // during the wire-up with mutex_ held: movers_ may be new

  static thread_local Mover* moved_here_;  // by this thread, until it has ended
  const std::shared_ptr<UcpContext> context_;
  const Library& library_;
  Settings settings_;
  std::vector<std::unique_ptr<Mover>> movers_;  // made by the wire-up, under mutex_; the same from then on
  std::vector<Transfer> transfers_;             // under mutex_; slots, which stay where they are
  std::vector<Part> parts_;                     // theirs
  std::vector<Transfer*> queue_;                // under mutex_: with something left to hand out, in order of posting
  std::vector<PoolKey> known_keys_;             // application thread only

  std::mutex messages_mutex_;  // of the next three
  std::vector<std::unique_ptr<Message[]>> batches_;
  std::vector<Message*> unused_;
  std::vector<Message*> outgoing_;
  // First mover's thread only:
  std::vector<Message*> sending_;
  std::vector<std::uint32_t> segments_;
  std::size_t messages_under_way_ = 0;

  // Under mutex_:
  bool started_ = false;
  std::optional<Parting> parting_;
  bool bye_sent_ = false;
  bool all_over_ = false;  // nobody waits for the peer's last word any more
  std::atomic<std::uint64_t> bytes_moved_{0};
};

}  // namespace kvxfer::ucx
