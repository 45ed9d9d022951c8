// What every backend is held to: named checks over any Context, knowing of it only what its Capabilities say.
//
//   CHECK_BACKEND(segments, out_of_order, moves) { ... subject.open() ... }
//
// is a check for the backends of which moves() is true. main.cpp runs all of them over each row of the registry.
#pragma once

#include <string>
#include <vector>

#include "backend/backend.h"
#include "tests/pair.h"

namespace kvxfer::test {

struct Subject {
  std::string name;
  Opener open;
  Capabilities can;  // what it claims

  Subject(std::string its_name, Opener opener)
      : name(std::move(its_name)), open(std::move(opener)), can(open()->capabilities()) {}

  std::vector<Op> ops() const {
    std::vector<Op> all;
    if (can.push) all.push_back(Op::push);
    if (can.pull) all.push_back(Op::pull);
    return all;
  }
};

struct BackendCheck {
  std::string name;
  bool (*applies)(const Capabilities&);
  void (*run)(const Subject&);
};

std::vector<BackendCheck>& backend_checks();
bool add_backend_check(BackendCheck check);

// Whom a check is for.
inline bool all(const Capabilities&) { return true; }
inline bool moves(const Capabilities& can) { return can.moves_data; }
inline bool pushes(const Capabilities& can) { return can.moves_data && can.push; }

}  // namespace kvxfer::test

#define CHECK_BACKEND(group, name, applies)                                           \
  static void group##_##name(const ::kvxfer::test::Subject&);                         \
  [[maybe_unused]] static const bool group##_##name##_added =                         \
      ::kvxfer::test::add_backend_check({#group "." #name, applies, group##_##name}); \
  static void group##_##name([[maybe_unused]] const ::kvxfer::test::Subject& subject)
