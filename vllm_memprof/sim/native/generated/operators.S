/* The operators' entry points, of the rows of names.inc: jumps that keep the caller's arguments in
   place. A first stage hands on its index. */
#if defined(__aarch64__)
#define ENTRY(name) .globl name; .type name, %function; name:
#define OPERATOR(name, operation, index) ENTRY(name) mov w16, index; b memprof_sim_aclnn_entry
#define RUN(name) ENTRY(name) b memprof_sim_aclnn_run
#define RUN_ATB(name) ENTRY(name) b memprof_sim_atb_run
#else
#define ENTRY(name) .globl name; .type name, @function; name:
#define OPERATOR(name, operation, index) ENTRY(name) movl $index, %eax; jmp memprof_sim_aclnn_entry
#define RUN(name) ENTRY(name) jmp memprof_sim_aclnn_run
#define RUN_ATB(name) ENTRY(name) jmp memprof_sim_atb_run
#endif
/* What the others are: names.cpp. */
#define IMPLEMENTED(name)
#define ABSENT(name)
#define NOOP(name)
#define FAILING(name)
#define FAILING_NULL(name)
#define ATB(name, target, family)
.text
.hidden memprof_sim_aclnn_entry
.hidden memprof_sim_aclnn_run
.hidden memprof_sim_atb_run
#include <names.inc>
#if defined(__linux__)
.section .note.GNU-stack,"",%progbits
#endif
