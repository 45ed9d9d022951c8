// The suite can fail: which check finds which double, and what it says.
#include <algorithm>
#include <optional>
#include <utility>

#include "tests/conformance/rig.h"
#include "tests/doubles/doubles.h"

namespace kvxfer::test {
namespace {

struct Finding {
  const char* name;
  std::unique_ptr<Context> (*open)();
  const char* check;
  const char* says;
};

constexpr Finding findings[] = {
    {"local before delivery", local_before_delivery, "order.after_local_the_source_may_be_written_over", "wrong words"},
    {"confirmed before delivery", confirmed_before_delivery, "order.confirmed_means_that_the_other_side_has_every_byte",
     "wrong words"},
    {"confirmed before delivery", confirmed_before_delivery, "ready.set_after_the_post_with_any_value",
     "confirmed came before the flag was set"},
    {"two pieces swapped", two_pieces_swapped, "moving.hundred_thousand_pieces", "wrong words, the first in piece 0"},
    {"two pieces swapped", two_pieces_swapped, "segments.in_any_order_move_their_pieces_and_no_others", "wrong words"},
    {"one byte flipped", one_byte_flipped, "moving.one_piece", "1 wrong words, the first in piece 0, word 131071"},
    {"one byte flipped", one_byte_flipped, "moving.one_byte", "1 wrong words"},
    {"one byte flipped", one_byte_flipped, "moving.odd_lengths_and_alignments", "1 wrong words, the first in piece 0"},
    {"dies after bytes", dies_after_bytes, "moving.fragmentation_over_several_regions", "closed the connection"},
    {"dies after bytes", dies_after_bytes, "tags.are_used_again_at_once", "closed the connection"},
    {"never answers", never_answers, "moving.one_byte", "confirmed of tag 40 did not come"},
    {"never answers", never_answers, "order.every_event_once_with_its_time_and_peer", "armed of tag 7 did not come"},
    {"never answers", never_answers, "cancel.anywhere_on_its_way", "the end of tag 5 did not come"},
    {"answers garbage", answers_garbage, "moving.one_byte", "in place of confirmed of tag 40"},
    {"answers garbage", answers_garbage, "deadline.of_poll", "poll"},
    {"answers of strangers", answers_of_strangers, "deadline.of_poll", "poll"},
    {"says everything twice", says_everything_twice, "order.every_event_once_with_its_time_and_peer", "one more event"},
    {"says everything twice", says_everything_twice, "order.release_either_way", "released"},
    {"claims more in flight", claims_more_inflight, "inflight.as_many_as_promised_and_one_more_is_refused",
     "256 transfers are open"},
    {"claims pull", claims_pull, "moving.one_piece", "this backend has no pull"},
    {"claims one-sided", claims_one_sided, "order.one_sided_needs_nothing_of_the_passive_application",
     "confirmed of tag 1 did not come"},
    {"claims no arm", claims_no_arm, "moving.one_piece", "was not armed"},
    {"claims any memory", claims_any_memory, "memory.of_others_moves_or_is_refused", "memory of its own only"},
    {"claims to move data", claims_to_move_data, "moving.one_byte", "1 wrong words"},
};

// Only a double that never says something makes a check wait; it would say it within this.
constexpr Nanoseconds short_patience = second;

struct Impatient {
  const Nanoseconds before = std::exchange(patience, short_patience);
  ~Impatient() { patience = before; }
};

const BackendCheck& find_check(const std::string& name) {
  const auto& checks = backend_checks();
  const auto found = std::ranges::find(checks, name, &BackendCheck::name);
  if (found == checks.end()) throw Failure("there is no check " + name);
  return *found;
}

void require_found(const Finding& finding) {
  const Subject subject(finding.name, finding.open);
  const BackendCheck& check = find_check(finding.check);
  if (!check.applies(subject.can)) throw Failure("the check is not for it");
  const bool waits = std::string(finding.says).find("did not come") != std::string::npos;
  std::optional<Impatient> impatient;
  if (waits) impatient.emplace();
  try {
    check.run(subject);
  } catch (const std::exception& error) {
    if (std::string(error.what()).find(finding.says) == std::string::npos)
      throw Failure(std::string("it said: ") + error.what());
    return;
  }
  throw Failure("it found nothing");
}

[[maybe_unused]] const bool added = [] {
  for (const Finding& finding : findings) {
    if (!order_is_seen_across_sides && std::string(finding.check).starts_with("order.confirmed_means")) continue;
    add("doubles." + std::string(finding.name) + ": " + finding.check, [&finding] { require_found(finding); });
  }
  return true;
}();

}  // namespace
}  // namespace kvxfer::test
