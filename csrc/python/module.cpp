// kvxfer._native: the core as Python sees it. Everything that waits or works long releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "backend/compute.h"
#include "backend/loop.h"
#include "backend/pipeline.h"
#include "backend/registry.h"
#include "backends/ucx/ucx.h"
#include "memory/copy.h"
#include "memory/mapping.h"
#include "memory/parallel.h"
#include "memory/pattern.h"

NB_MAKE_OPAQUE(kvxfer::Regions)  // a class of its own in Python, not a list

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvxfer;

namespace {

// Only arrays of this very type: a silent conversion would hide a caller's mistake behind a copy. Every argument of
// this type is declared noconvert().
template <typename T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::span<const T> view(const Array<T>& array) {
  return {array.data(), array.size()};
}

using Unlocked = nb::call_guard<nb::gil_scoped_release>;

nb::bytes raw(const std::string& text) { return nb::bytes(text.data(), text.size()); }

nb::bytes raw(const std::vector<Nanoseconds>& samples) {
  return nb::bytes(samples.data(), samples.size() * sizeof(Nanoseconds));
}

std::string text(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

// A native Error becomes the KvxferError of its status.
void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    const nb::object made = nb::module_::import_("kvxfer.errors")
                                .attr("from_status")(static_cast<int>(error.fault()), std::string(error.what()));
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
  }
}

std::shared_ptr<Plan> prepare(Context& context, Peer& peer, const Array<std::uint32_t>& local_regions,
                              const Array<std::uint64_t>& local_offsets, const Array<std::uint32_t>& remote_regions,
                              const Array<std::uint64_t>& remote_offsets, const Array<std::uint64_t>& lengths,
                              const Array<std::uint32_t>& segment_starts, Nanoseconds timeout_ns) {
  const PlanArrays arrays{view(local_regions),  view(local_offsets), view(remote_regions),
                          view(remote_offsets), view(lengths),       view(segment_starts)};
  const nb::gil_scoped_release unlocked;
  return context.prepare(peer, arrays, Deadline::after(timeout_ns));
}

std::vector<Event> poll(Context& context, std::size_t most, Nanoseconds timeout_ns) {
  const nb::gil_scoped_release unlocked;
  std::vector<Event> events(most);
  events.resize(context.poll(events, Deadline::after(timeout_ns)));
  return events;
}

Regions make_regions(const std::vector<std::pair<std::uint64_t, std::uint64_t>>& extents) {
  Regions regions;
  for (const auto& [address, bytes] : extents) regions.push_back({reinterpret_cast<std::byte*>(address), bytes});
  return regions;
}

template <typename T>
std::vector<T> copied(const Array<T>& array) {
  return {array.data(), array.data() + array.size()};
}

Leg make_leg(std::shared_ptr<Peer> peer, std::shared_ptr<Plan> plan, const Array<std::uint32_t>& own_regions,
             const Array<std::uint64_t>& own_offsets, const Array<std::uint32_t>& source_regions,
             const Array<std::uint64_t>& source_offsets, const Array<std::uint64_t>& lengths) {
  const std::size_t n = lengths.size();
  if (own_regions.size() != n || own_offsets.size() != n || source_regions.size() != n || source_offsets.size() != n)
    throw Error(Fault::usage, "the arrays of a leg differ in length");
  return {std::move(peer),
          std::move(plan),
          {copied(own_regions), copied(own_offsets), copied(source_regions), copied(source_offsets), copied(lengths)}};
}

// The native loops trust their pieces; what comes from Python is held against the regions first.
void require_inside(const Regions& regions, const Pieces& pieces) {
  for (std::size_t i = 0; i < pieces.count(); ++i) {
    const std::uint32_t r = pieces.own_regions[i];
    if (r >= regions.size() || pieces.lengths[i] > regions[r].bytes ||
        pieces.own_offsets[i] > regions[r].bytes - pieces.lengths[i])
      throw Error(Fault::usage, "piece " + std::to_string(i) + " lies outside its region");
  }
}

Verification verify_leg(const Regions& regions, const Leg& leg, std::uint64_t seed, std::uint64_t epoch,
                        std::uint32_t every) {
  if (every == 0) throw Error(Fault::usage, "every 0th piece cannot be compared");
  require_inside(regions, leg.pieces);
  const nb::gil_scoped_release unlocked;
  return verify(regions, leg.pieces, seed, epoch, every);
}

// `requests` by value: a list of pointers would take None for one.
LoopResult loop(Context& context, const std::vector<LoopRequest>& requests, const Regions& regions, Side side, Op op,
                std::uint64_t first_epoch, std::uint32_t count, std::uint32_t inflight, bool check, std::uint64_t seed,
                Nanoseconds stall_ns) {
  for (const LoopRequest& request : requests)
    for (const Leg& leg : request.legs) require_inside(regions, leg.pieces);
  const nb::gil_scoped_release unlocked;
  return run_loop(context, requests, regions, {side, op, first_epoch, count, inflight, check, seed, stall_ns});
}

using Sends = std::vector<std::pair<std::uint32_t, std::vector<std::vector<std::uint32_t>>>>;

PipelineResult pipeline(Context& context, const std::vector<LoopRequest>& requests, const Regions& regions, Sends sends,
                        Compute* compute, Side side, Op op, std::uint64_t first_epoch, std::uint32_t count, bool check,
                        std::uint64_t seed, Nanoseconds stall_ns) {
  for (const LoopRequest& request : requests)
    for (const Leg& leg : request.legs) require_inside(regions, leg.pieces);
  std::vector<Send> made;
  for (auto& [ready_after, segments] : sends) made.push_back({ready_after, std::move(segments)});
  const nb::gil_scoped_release unlocked;
  return run_pipeline(context, requests, regions, made, compute, {side, op, first_epoch, count, check, seed, stall_ns});
}

Nanoseconds copy(std::uint64_t to, const Array<std::uint64_t>& to_offsets, std::uint64_t from,
                 const Array<std::uint64_t>& from_offsets, const Array<std::uint64_t>& lengths) {
  if (to_offsets.size() != lengths.size() || from_offsets.size() != lengths.size())
    throw Error(Fault::usage, "the arrays of a copy differ in length");
  const nb::gil_scoped_release unlocked;
  return copy_pieces(reinterpret_cast<std::byte*>(to), view(to_offsets), reinterpret_cast<const std::byte*>(from),
                     view(from_offsets), view(lengths));
}

void bind_memory(nb::module_& m) {
  nb::enum_<Backing>(m, "Backing").value("anonymous", Backing::anonymous).value("shared", Backing::shared);
  nb::class_<Mapping>(m, "Mapping", "Memory, huge pages advised, every page touched; freed with the object.")
      .def(nb::init<std::uint64_t, Backing, int>(), "bytes"_a, "backing"_a = Backing::anonymous, "numa"_a = -1,
           Unlocked())
      .def_prop_ro("address", [](const Mapping& self) { return reinterpret_cast<std::uint64_t>(self.address()); })
      .def_prop_ro("bytes", &Mapping::bytes);
  nb::class_<Regions>(m, "Regions", "(address, bytes) of each region, by its number; 0 bytes: left alone.")
      .def(
          "__init__",
          [](Regions* self, const std::vector<std::pair<std::uint64_t, std::uint64_t>>& extents) {
            new (self) Regions(make_regions(extents));
          },
          "extents"_a);
  nb::class_<Verification>(m, "Verification")
      .def_ro("bytes_checked", &Verification::bytes_checked)
      .def_ro("wrong_words", &Verification::wrong_words)
      .def_ro("piece", &Verification::piece)
      .def_ro("word", &Verification::word);
  m.def(
      "fill", [](const Regions& regions, std::uint64_t seed) { fill(regions, seed); }, "regions"_a, "seed"_a,
      Unlocked());
  m.def(
      "poison",
      [](std::uint64_t address, std::uint64_t bytes) { poison(reinterpret_cast<std::byte*>(address), bytes); },
      "address"_a, "bytes"_a, Unlocked());
  m.def("verify", &verify_leg, "regions"_a, "leg"_a, "seed"_a, "epoch"_a, "every"_a);
  m.def("copy_pieces", &copy, "to"_a, "to_offsets"_a.noconvert(), "source"_a, "from_offsets"_a.noconvert(),
        "lengths"_a.noconvert());
  m.def("usable_cores", &usable_cores);
}

void bind_words(nb::module_& m) {
  nb::enum_<Op>(m, "Op").value("push", Op::push).value("pull", Op::pull);
  nb::enum_<MemoryKind>(m, "MemoryKind").value("host", MemoryKind::host).value("cuda", MemoryKind::cuda);
  nb::enum_<Side>(m, "Side").value("prefill", Side::prefill).value("decode", Side::decode);
  nb::enum_<EventKind>(m, "EventKind")
      .value("armed", EventKind::armed)
      .value("local", EventKind::local)
      .value("confirmed", EventKind::confirmed)
      .value("delivered", EventKind::delivered)
      .value("released", EventKind::released)
      .value("cancelled", EventKind::cancelled)
      .value("error", EventKind::error)
      .value("peer_lost", EventKind::peer_lost);
  nb::class_<Event>(m, "Event")
      .def_ro("tag", &Event::tag)
      .def_ro("kind", &Event::kind)
      .def_ro("peer", &Event::peer)
      .def_ro("time_ns", &Event::time_ns);
  nb::class_<Region>(m, "Region")
      .def_ro("id", &Region::id)
      .def_ro("kind", &Region::kind)
      .def_prop_ro("address", [](const Region& self) { return reinterpret_cast<std::uint64_t>(self.address); })
      .def_ro("bytes", &Region::bytes);
  nb::class_<Capabilities>(m, "Capabilities")
      .def_ro("one_sided", &Capabilities::one_sided)
      .def_ro("needs_arm", &Capabilities::needs_arm)
      .def_ro("own_memory", &Capabilities::own_memory)
      .def_ro("moves_data", &Capabilities::moves_data)
      .def_ro("push", &Capabilities::push)
      .def_ro("pull", &Capabilities::pull)
      .def_ro("max_inflight", &Capabilities::max_inflight)
      .def_ro("memory", &Capabilities::memory)
      .def_ro("backing", &Capabilities::backing);
  nb::class_<Probe>(m, "Probe")
      .def_ro("available", &Probe::available)
      .def_ro("why_not", &Probe::why_not)
      .def_ro("library_path", &Probe::library_path)
      .def_ro("library_version", &Probe::library_version)
      .def_ro("transports", &Probe::transports)
      .def_ro("warning", &Probe::warning);
  nb::class_<ReadyFlag>(m, "ReadyFlag", "A host flag that a post can wait for.")
      .def("__init__", [](ReadyFlag* self) { new (self) ReadyFlag(0); })
      .def("set", [](ReadyFlag& self) { self.store(1, std::memory_order_release); });
}

void bind_backend(nb::module_& m) {
  nb::class_<Peer>(m, "Peer")
      .def_prop_ro("id", &Peer::id)
      .def(
          "import_keys",
          [](Peer& self, const nb::bytes& keys) {
            const std::string copy = text(keys);
            const nb::gil_scoped_release unlocked;
            self.import_keys(copy);
          },
          "keys"_a)
      .def("describe", &Peer::describe)
      .def_prop_ro("lost", &Peer::lost);
  nb::class_<Plan>(m, "Plan")
      .def_prop_ro("bytes", &Plan::bytes)
      .def_prop_ro("descriptors", &Plan::descriptors)
      .def_prop_ro("segments", &Plan::segments);
  nb::class_<Context>(m, "Context")
      .def_prop_ro("capabilities", &Context::capabilities, nb::rv_policy::copy)
      .def(
          "allocate",
          [](Context& self, std::uint64_t bytes, MemoryKind kind, int numa) {
            return self.allocate(bytes, kind, numa);
          },
          "bytes"_a, "kind"_a = MemoryKind::host, "numa"_a = -1, Unlocked())
      .def(
          "register_memory",
          [](Context& self, std::uint64_t address, std::uint64_t bytes, MemoryKind kind) {
            return self.register_memory(reinterpret_cast<std::byte*>(address), bytes, kind);
          },
          "address"_a, "bytes"_a, "kind"_a = MemoryKind::host, Unlocked())
      .def("listen", &Context::listen, "address"_a, "port"_a, Unlocked())
      .def(
          "accept", [](Context& self, Nanoseconds timeout) { return self.accept(Deadline::after(timeout)); },
          "timeout_ns"_a, Unlocked(), nb::keep_alive<0, 1>())
      .def(
          "connect",
          [](Context& self, const std::string& endpoint, Nanoseconds timeout) {
            return self.connect(endpoint, Deadline::after(timeout));
          },
          "endpoint"_a, "timeout_ns"_a, Unlocked(), nb::keep_alive<0, 1>())
      .def(
          "export_keys",
          [](Context& self, const std::vector<Region>& regions) { return raw(self.export_keys(regions)); }, "regions"_a)
      .def("prepare", &prepare, "peer"_a, "local_regions"_a.noconvert(), "local_offsets"_a.noconvert(),
           "remote_regions"_a.noconvert(), "remote_offsets"_a.noconvert(), "lengths"_a.noconvert(),
           "segment_starts"_a.noconvert(), "timeout_ns"_a, nb::keep_alive<0, 1>())
      .def(
          "arm",
          [](Context& self, Plan& plan, Op op, const std::vector<std::uint32_t>& segments, std::uint64_t tag) {
            self.arm(plan, op, segments, tag);
          },
          "plan"_a, "op"_a, "segments"_a, "tag"_a, Unlocked())
      .def(
          "post",
          [](Context& self, Plan& plan, Op op, const std::vector<std::uint32_t>& segments, std::uint64_t tag,
             const ReadyFlag* ready) { self.post(plan, op, segments, tag, ready); },
          "plan"_a, "op"_a, "segments"_a, "tag"_a, "ready"_a = nb::none(), Unlocked(),
          nb::keep_alive<1, 6>())  // a lane looks at the flag until close()
      .def("release", &Context::release, "peer"_a, "tag"_a, Unlocked())
      .def("cancel", &Context::cancel, "peer"_a, "tag"_a, Unlocked())
      .def("poll", &poll, "most"_a, "timeout_ns"_a)
      .def(
          "progress", [](Context& self, Nanoseconds timeout) { self.progress(Deadline::after(timeout)); },
          "timeout_ns"_a, Unlocked())
      .def("event_fd", &Context::event_fd)
      .def_prop_ro("bytes_moved", &Context::bytes_moved)
      .def("details", &Context::details)
      .def("close", &Context::close, Unlocked());
  m.def("backends", [] {
    std::vector<std::pair<std::string, std::string>> rows;
    for (const BackendRow& row : backends()) rows.emplace_back(row.name, row.summary);
    return rows;
  });
  m.def("one_host", [](const std::string& name) { return find_backend(name).one_host; }, "name"_a);
  m.def(
      "present",
      [](const std::string& name) {
        const BackendRow& row = find_backend(name);
        return row.present != nullptr ? row.present() : row.probe().available;
      },
      "name"_a, Unlocked());
  m.def("probe", [](const std::string& name) { return find_backend(name).probe(); }, "name"_a, Unlocked());
  m.def(
      "open_context",
      [](const std::string& name, const nb::bytes& token, const Options& options) {
        if (token.size() != token_bytes) throw Error(Fault::usage, "a token has 32 bytes");
        return find_backend(name).open(text(token), options);
      },
      "name"_a, "token"_a, "options"_a);
}

void bind_loop(nb::module_& m) {
  nb::class_<Leg>(m, "Leg", "What one peer carries of a request; region numbers are those of either side.")
      .def(
          "__init__",
          [](Leg* self, std::shared_ptr<Peer> peer, std::shared_ptr<Plan> plan, const Array<std::uint32_t>& own_regions,
             const Array<std::uint64_t>& own_offsets, const Array<std::uint32_t>& source_regions,
             const Array<std::uint64_t>& source_offsets, const Array<std::uint64_t>& lengths) {
            new (self) Leg(make_leg(std::move(peer), std::move(plan), own_regions, own_offsets, source_regions,
                                    source_offsets, lengths));
          },
          "peer"_a, "plan"_a, "own_regions"_a.noconvert(), "own_offsets"_a.noconvert(), "source_regions"_a.noconvert(),
          "source_offsets"_a.noconvert(), "lengths"_a.noconvert(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>());
  nb::class_<LoopRequest>(m, "LoopRequest")
      .def(
          "__init__", [](LoopRequest* self, std::vector<Leg> legs) { new (self) LoopRequest{std::move(legs)}; },
          "legs"_a);
  nb::class_<LoopResult>(m, "LoopResult")
      .def_prop_ro("transfer_ns", [](const LoopResult& self) { return raw(self.transfer_ns); })
      .def_prop_ro("post_ns", [](const LoopResult& self) { return raw(self.post_ns); })
      .def_prop_ro("handover_ns", [](const LoopResult& self) { return raw(self.handover_ns); })
      .def_ro("wall_ns", &LoopResult::wall_ns)
      .def_ro("wrong_epochs", &LoopResult::wrong_epochs)
      .def_ro("checking_cpu_ns", &LoopResult::checking_cpu_ns);
  m.def("run_loop", &loop, "context"_a, "requests"_a, "regions"_a, "side"_a, "op"_a, "first_epoch"_a, "count"_a,
        "inflight"_a, "check"_a, "seed"_a, "stall_ns"_a);
}

void bind_pipeline(nb::module_& m) {
  nb::class_<Compute>(m, "Compute", "The prefill that transfers are hidden behind, unit by unit.");
  nb::class_<TimedCompute, Compute>(m, "TimedCompute", "Units that take their time and no CPU.")
      .def(nb::init<const std::vector<Nanoseconds>&>(), "unit_ns"_a);
  nb::class_<SpinCompute, Compute>(m, "SpinCompute", "Units that hold a core for so much CPU time.")
      .def(nb::init<const std::vector<Nanoseconds>&>(), "unit_ns"_a);
  nb::class_<ExternalCompute, Compute>(m, "ExternalCompute", "Units that a thread of the caller computes.")
      .def(nb::init<std::size_t>(), "units"_a)
      .def("await_start", &ExternalCompute::await_start, Unlocked())
      .def("unit_ended", &ExternalCompute::unit_ended)
      .def("stop", &ExternalCompute::stop, Unlocked());
  nb::class_<PipelineResult>(m, "PipelineResult")
      .def_prop_ro("total_ns", [](const PipelineResult& self) { return raw(self.total_ns); })
      .def_prop_ro("compute_ns", [](const PipelineResult& self) { return raw(self.compute_ns); })
      .def_prop_ro("ready_ns", [](const PipelineResult& self) { return raw(self.ready_ns); })
      .def_prop_ro("usable_ns", [](const PipelineResult& self) { return raw(self.usable_ns); })
      .def_ro("wrong_epochs", &PipelineResult::wrong_epochs);
  m.def("run_pipeline", &pipeline, "context"_a, "requests"_a, "regions"_a, "sends"_a, "compute"_a.none(), "side"_a,
        "op"_a, "first_epoch"_a, "count"_a, "check"_a, "seed"_a, "stall_ns"_a);
}

// Where Python finds its packages, one of which may bring a UCX.
std::vector<std::string> package_folders() {
  std::vector<std::string> folders;
  for (const nb::handle folder : nb::module_::import_("sys").attr("path"))
    if (nb::isinstance<nb::str>(folder)) folders.push_back(nb::cast<std::string>(folder));
  return folders;
}

}  // namespace

NB_MODULE(_native, m) {
  nb::register_exception_translator(translate);
  ucx::look_in(package_folders());
  bind_memory(m);
  bind_words(m);
  bind_backend(m);
  bind_loop(m);
  bind_pipeline(m);
}
