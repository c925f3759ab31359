#pragma once

// Exchanges between GPUs of one host whose processes write into one another's memory. Only CUDA
// builds have them.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/dtype.h"

namespace oomb::peers {

// Ranks, and pieces of their messages, that a kernel's parameters have room for.
constexpr int kMostRanks = 16, kMostPieces = 32;

// Rows of equal bytes, [tokens][batch][heads], in some order: how far apart neighbours are, in
// bytes.
struct Spacing {
  int64_t token = 0, batch = 0, head = 0;
};

// A part of a tensor and where it stands in a message.
struct Piece {
  int rank = 0;                 // whom the message goes to, or comes from
  std::byte* tensor = nullptr;  // its first row
  int64_t offset = 0;           // of its first row in the message, bytes
  Spacing in_tensor = {}, in_message = {};
  int64_t tokens = 1, batch = 1, heads = 1, row_bytes = 0;
};

// Rows from one place to another.
struct RowCopy {
  const std::byte* source = nullptr;
  std::byte* target = nullptr;
  Spacing in_source = {}, in_target = {};
  int64_t tokens = 1, batch = 1, heads = 1, row_bytes = 0;
};

// One message to each other rank and one from each. What stands where in a message both ends know.
// What is kept is written while other things are still sent, so they must not overlap.
struct Exchange {
  std::vector<Piece> sent = {}, received = {};  // with `kept` at most kMostPieces each
  std::vector<RowCopy> kept = {};               // what this rank has for itself
  int64_t slot_bytes = 0;  // at least the largest message between any two ranks; the same on all
  void* stream = nullptr;  // a cudaStream_t, in which all earlier exchanges come before this one
};

// A tensor of each rank, which all replace by their sum. Each rank adds up a part of it, of
// `bytes`: a multiple of 16.
struct Sum {
  std::byte* parts = nullptr;  // of all ranks, one behind the other; begins on 16 bytes
  int64_t bytes = 0;
  DType dtype = DType::kFloat32;  // or bfloat16, which is added up in fp32 and rounded once
  int blocks = 0;                 // of threads, which no kernel has more of; 0: as many as help
  void* stream = nullptr;         // as of Exchange
};

enum class Halt : int { kNone = 0, kAborted = 1, kTimedOut = 2 };

// Memory of a GPU that other processes write their messages into:
//
//   flags | side 0: from rank 0 | from rank 1 | …  | side 1: from rank 0 | …
//
//   rank 0   push 1: into side 1 of others  meet 1   pull 1: out of its side 1   push 2: side 0 …
//   rank 1   push 1: into side 1 of others  meet 1   pull 1: out of its side 1   push 2: side 0 …
//
// To meet, a rank writes the exchange's number into its flag at each other rank and waits for
// theirs. Exchanges take turns with two sides, so nobody is asked whether a side is free: who
// pushes number n + 2 has met everybody at n + 1, to which each rank's stream comes after its pull
// n.
//
// Waiting kernels give up when abort() is called, or after a time limit; what is received is
// undefined from there on.
class PeerExchange {
 public:
  virtual ~PeerExchange() = default;

  // Forgets earlier exchanges. Returns what other processes reach the memory by. All ranks' streams
  // are idle, and no rank connects before all have begun. `timeout_seconds`: of one wait.
  virtual std::string begin(double timeout_seconds) = 0;
  // Reaches the memory of all ranks, this one's among them.
  virtual void connect(int rank, const std::vector<std::string>& handles) = 0;
  // Gives up what connect() has reached. The stream is idle.
  virtual void disconnect() noexcept = 0;

  virtual void exchange(const Exchange& exchange) = 0;
  // Two exchanges, of which the second carries what has been added up between:
  //
  //   rank 0   [ a0 | b0 ]  push b0   meet   a = a0 + a1, pushed   meet   pull b   [ a | b ]
  //   rank 1   [ a1 | b1 ]  push a1   meet   b = b0 + b1, pushed   meet   pull a   [ a | b ]
  //
  // In the order of ranks, so all have the same bits.
  virtual void sum(const Sum& sum) = 0;

  // From any thread: nobody here waits any longer.
  virtual void abort() noexcept = 0;
  // Whether kernels have given up, as far as they have come.
  virtual Halt halted() const noexcept = 0;

  virtual int device() const = 0;
  virtual int64_t side_bytes() const = 0;
};

// `side_bytes`: room for one exchange; there are two.
std::unique_ptr<PeerExchange> make_peer_exchange(int device, int64_t side_bytes);

}  // namespace oomb::peers
