// Backends that behave badly on purpose: what the conformance suite has to find, and the measuring loop to survive.
// Each is a real one with one thing changed. Bytes go from the side that connects to the side that listens.
#pragma once

#include <memory>

#include "backend/backend.h"

namespace kvxfer::test {

// Behaves well: two-sided, useless unless armed and progressed. A post before its arm is refused, and nothing moves
// before the passive side has been polled after arm(), and the initiator after post(). It has no pull.
std::unique_ptr<Context> two_sided();

// --- late
inline constexpr Nanoseconds delay = 200'000'000;
std::unique_ptr<Context> local_before_delivery();  // says `local` at once, and reads the source only after the delay
std::unique_ptr<Context> confirmed_before_delivery();  // says `confirmed` at once

// --- wrong bytes
std::unique_ptr<Context> two_pieces_swapped();  // of equal length
std::unique_ptr<Context> one_byte_flipped();    // the last of the first piece

// --- gone
inline constexpr std::uint64_t last_words = 50'000;  // bytes
std::unique_ptr<Context> dies_after_bytes();         // the listening side, once so many have moved
std::unique_ptr<Context> never_answers();            // takes every post and every arm, and that is all

// --- garbage
std::unique_ptr<Context> answers_garbage();       // events of any kind, tag and peer in place of the true ones
std::unique_ptr<Context> answers_of_strangers();  // an endless stream of events of peers that are not there
std::unique_ptr<Context> says_everything_twice();

// --- claims
std::unique_ptr<Context> claims_more_inflight();
std::unique_ptr<Context> claims_pull();
std::unique_ptr<Context> claims_one_sided();
std::unique_ptr<Context> claims_no_arm();
std::unique_ptr<Context> claims_any_memory();
std::unique_ptr<Context> claims_to_move_data();

}  // namespace kvxfer::test
