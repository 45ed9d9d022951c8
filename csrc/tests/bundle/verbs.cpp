// A libibverbs, for ucx_bundled_test.cpp.
extern "C" const char* whose_verbs() { return VERBS_WHOSE; }
extern "C" const char verbs_versions[] = VERBS_VERSIONS;  // extern for once, so that it is not left out
