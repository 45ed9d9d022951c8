// A small test runner. pip, which is all that a user's `make test` has to fetch things with, carries no C++ test
// framework, and these tests need little of one: named cases, checks that say what they saw, a filter, and a deadline
// of each case.
//
//   TEST(lane, wrong_token_is_dropped) { CHECK_EQ(got, wanted); }
//
// A failed check ends its case by an exception; check it on the case's own thread.
#pragma once

#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "backend/error.h"

namespace kvxfer::test {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Case {
  std::string name;
  std::function<void()> run;
};

// Filled by TEST before main().
std::vector<Case>& cases();
bool add(std::string name, std::function<void()> run);
// The main() of a test program. [FILTER]: runs the cases whose name contains it; --list names them.
int run_cases(int argc, char** argv);

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <typename A, typename B>
void check_equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream what;
  what << text << ": " << a << " and " << b;
  fail(file, line, what.str());
}

template <typename Body>
void check_throws(Fault fault, const std::string& part, const Body& body, const char* text, const char* file,
                  int line) {
  try {
    body();
  } catch (const Error& error) {
    if (error.fault() == fault && std::string(error.what()).find(part) != std::string::npos) return;
    fail(file, line,
         std::string(text) + " threw fault " + std::to_string(static_cast<int>(error.fault())) + ": " + error.what());
  }
  fail(file, line, std::string(text) + " threw nothing");
}

}  // namespace kvxfer::test

#define TEST(group, name)                                                                                            \
  static void group##_##name();                                                                                      \
  [[maybe_unused]] static const bool group##_##name##_added = ::kvxfer::test::add(#group "." #name, group##_##name); \
  static void group##_##name()

#define CHECK(condition)                                                    \
  do {                                                                      \
    if (!(condition)) ::kvxfer::test::fail(__FILE__, __LINE__, #condition); \
  } while (false)

#define CHECK_EQ(a, b) ::kvxfer::test::check_equal((a), (b), #a " == " #b, __FILE__, __LINE__)

// The expression throws kvxfer::Error of that fault, with `part` in its message.
#define CHECK_THROWS(fault, part, expression) \
  ::kvxfer::test::check_throws((fault), (part), [&] { (void)(expression); }, #expression, __FILE__, __LINE__)
