// Poison mode: which bytes of the device hold values that nobody computed, and where the host reads
// such a value. It changes no value. Off unless MEMPROF_SIM_POISON names a file; each kind of read
// is then one line of JSON in it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <utility>
#include <vector>

struct aclTensor;

namespace memprof_sim {

struct Call;

inline const bool poison_mode = getenv("MEMPROF_SIM_POISON") != nullptr;

// For tests: whether a part of what is answered without computing is taken out, by its name in
// MEMPROF_SIM_WITHOUT ("choices", "counts", "equal", "isclose", "random", separated by commas).
bool taken_out(const char *answer);

// Changes without an operator. `by` names who was to write the bytes and did not.
void poison_fresh(const void *pointer, uint64_t bytes);
void poison_known(const void *pointer, uint64_t bytes);
void poison_left(const void *pointer, uint64_t bytes, const char *by);
void poison_answer(const void *pointer, uint64_t bytes, const char *by);
void poison_copy(const void *destination, const void *source, uint64_t bytes);
void poison_host_read(const char *reader, const void *source, uint64_t bytes);

// The call of an operator under way on this thread. What its kernel reads and writes is noted; when
// it ends, bytes that it wrote are as known as those that it read, and results that it did not
// write are left by it.
class PoisonCall {
 public:
  PoisonCall(const Call &call, const char *family);  // the family is part of the name in a report
  ~PoisonCall();

  struct Piece {
    uintptr_t start, end;
    bool answer;
  };
  std::vector<Piece> reads, writes;
  bool answering = false;

 private:
  const Call &call_;
  const char *family_;
};

PoisonCall *&poison_call();  // of this thread; null outside a call
void poison_note(std::vector<PoisonCall::Piece> &pieces, const void *at, uint64_t bytes);

inline void note_read(const void *at, uint64_t bytes) {
  if (poison_mode && poison_call()) poison_note(poison_call()->reads, at, bytes);
}
inline void note_write(const void *at, uint64_t bytes) {
  if (poison_mode && poison_call()) poison_note(poison_call()->writes, at, bytes);
}

// While it lives, what the call writes is an answer that was not computed.
class Answering {
 public:
  Answering() { set(true); }
  ~Answering() { set(false); }

 private:
  static void set(bool on) {
    if (poison_mode && poison_call()) poison_call()->answering = on;
  }
};

}  // namespace memprof_sim
