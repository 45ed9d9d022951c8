#include "tests/check.h"

// Blocks of 24 bytes that UCX allocates for itself and loses in the tests of ucx; nothing of ours is on their stack.
extern "C" const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() { return "leak:ucs_malloc\n"; }

int main(int argc, char** argv) { return kvxfer::test::run_cases(argc, argv); }
