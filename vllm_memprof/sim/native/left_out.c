/* Stand-ins for libraries that a stack links and leaves out, from the rows of names.inc, which the
   builder writes: every name that the engine's binaries ask of them, by its state (left_out.toml).
 */
#include <stdio.h>

/* cudaErrorNoDevice (driver_types.h). Other CUDA libraries read any value but 0 as a failure. */
enum { NO_DEVICE = 100 };

#define NOOP(name) \
  long name(void) { return 0; }
#define SILENT(name) \
  long name(void) { return NO_DEVICE; }
#define TEXT(name) \
  const char *name(void) { return "no CUDA here (memprof sim)"; }
#define FAILING(name)                                          \
  long name(void) {                                            \
    fprintf(stderr, "memprof sim: " #name ": no CUDA here\n"); \
    return NO_DEVICE;                                          \
  }
#include <names.inc>
