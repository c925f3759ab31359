#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "common/cuda_check.h"
#include "common/error.h"
#include "peers/peer_exchange.h"
#include "peers/peer_kernels.h"

namespace oomb::peers {
namespace {

constexpr int64_t kFlagBytes = kMostRanks * kFlagStride;
constexpr int64_t kHeadBytes = 4096;
static_assert(kFlagBytes <= kHeadBytes);
constexpr double kLongest = 1e9;          // seconds; their cycles are still a number
constexpr double kCyclesPerSecond = 2e9;  // about what GPUs run at most; slower ones wait longer
constexpr int64_t kMostPieceBytes = (int64_t{1} << 31) - 1;  // kernels count words in 32 bits

class CudaPeerExchange final : public PeerExchange {
 public:
  CudaPeerExchange(int device, int64_t side_bytes) : device_(device), side_bytes_(side_bytes) {
    const DeviceGuard guard(device_);
    try {
      void* memory = nullptr;
      check_cuda(cudaMalloc(&memory, static_cast<size_t>(kHeadBytes + 2 * side_bytes_)),
                 "cudaMalloc");
      memory_ = static_cast<std::byte*>(memory);
      void* halt = nullptr;
      check_cuda(cudaHostAlloc(&halt, sizeof(int), cudaHostAllocMapped), "cudaHostAlloc");
      halt_ = static_cast<volatile int*>(halt);
      *halt_ = static_cast<int>(Halt::kNone);
      void* seen = nullptr;
      check_cuda(cudaHostGetDevicePointer(&seen, halt, 0), "cudaHostGetDevicePointer");
      halt_on_device_ = static_cast<int*>(seen);
    } catch (...) {
      release();
      throw;
    }
  }
  CudaPeerExchange(const CudaPeerExchange&) = delete;
  CudaPeerExchange& operator=(const CudaPeerExchange&) = delete;
  ~CudaPeerExchange() override { release(); }

  std::string begin(double timeout_seconds) override {
    expect(timeout_seconds > 0, "timeout_seconds", "a positive number", timeout_seconds);
    const DeviceGuard guard(device_);
    disconnect();
    limit_cycles_ = static_cast<int64_t>(std::min(timeout_seconds, kLongest) * kCyclesPerSecond);
    number_ = 0;
    *halt_ = static_cast<int>(Halt::kNone);
    check_cuda(cudaMemset(memory_, 0, kHeadBytes), "cudaMemset");
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    cudaIpcMemHandle_t handle;
    check_cuda(cudaIpcGetMemHandle(&handle, memory_), "cudaIpcGetMemHandle");
    return {reinterpret_cast<const char*>(&handle), sizeof(handle)};
  }

  void connect(int rank, const std::vector<std::string>& handles) override {
    const int ranks = static_cast<int>(handles.size());
    expect(ranks >= 1 && ranks <= kMostRanks, "handles", "1 to 16 of them", ranks);
    expect(rank >= 0 && rank < ranks, "rank", "one of them", rank);
    for (const std::string& handle : handles) {
      expect(handle.size() == sizeof(cudaIpcMemHandle_t), "handles", "what begin() returned",
             Parts(handle.size(), " bytes"));
    }
    const DeviceGuard guard(device_);
    disconnect();
    rank_ = rank;
    try {
      for (int other = 0; other < ranks; ++other) {
        void* reached = memory_;
        if (other != rank) {
          cudaIpcMemHandle_t handle;
          std::memcpy(&handle, handles[static_cast<size_t>(other)].data(), sizeof(handle));
          check_cuda(cudaIpcOpenMemHandle(&reached, handle, cudaIpcMemLazyEnablePeerAccess),
                     "cudaIpcOpenMemHandle");
        }
        of_rank_.push_back(static_cast<std::byte*>(reached));
      }
    } catch (...) {
      disconnect();
      throw;
    }
  }

  void disconnect() noexcept override {
    for (size_t other = 0; other < of_rank_.size(); ++other) {
      if (static_cast<int>(other) != rank_) cudaIpcCloseMemHandle(of_rank_[other]);
    }
    of_rank_.clear();
  }

  void exchange(const Exchange& exchange) override {
    check(exchange);
    const DeviceGuard guard(device_);
    const auto stream = static_cast<cudaStream_t>(exchange.stream);
    ++number_;
    RowCopies push, pull;
    for (const RowCopy& copy : exchange.kept) {
      if (!is_empty(copy)) push.copy[push.count++] = copy;
    }
    for (const Piece& piece : exchange.sent) {
      if (is_empty(piece)) continue;
      push.copy[push.count++] = {.source = piece.tensor,
                                 .target = to(piece.rank, exchange.slot_bytes) + piece.offset,
                                 .in_source = piece.in_tensor,
                                 .in_target = piece.in_message,
                                 .tokens = piece.tokens,
                                 .batch = piece.batch,
                                 .heads = piece.heads,
                                 .row_bytes = piece.row_bytes};
    }
    for (const Piece& piece : exchange.received) {
      if (is_empty(piece)) continue;
      pull.copy[pull.count++] = {.source = from(piece.rank, exchange.slot_bytes) + piece.offset,
                                 .target = piece.tensor,
                                 .in_source = piece.in_message,
                                 .in_target = piece.in_tensor,
                                 .tokens = piece.tokens,
                                 .batch = piece.batch,
                                 .heads = piece.heads,
                                 .row_bytes = piece.row_bytes};
    }
    launch_copies(push, 0, stream);
    meet(stream);
    launch_copies(pull, 0, stream);
  }

  void sum(const Sum& sum) override {
    check(sum);
    const DeviceGuard guard(device_);
    const auto stream = static_cast<cudaStream_t>(sum.stream);
    ++number_;
    RowCopies push, pull;
    PartSum own;
    own.bytes = sum.bytes;
    std::byte* const own_part = sum.parts + rank_ * sum.bytes;
    for (int other = 0; other < ranks(); ++other) {
      std::byte* const part = sum.parts + other * sum.bytes;
      own.parts[own.count++] = other == rank_ ? part : from(other, sum.bytes);
      if (other == rank_) continue;
      push.copy[push.count++] = {
          .source = part, .target = to(other, sum.bytes), .row_bytes = sum.bytes};
    }
    launch_copies(push, sum.blocks, stream);
    meet(stream);
    ++number_;
    for (int other = 0; other < ranks(); ++other) {
      own.targets[other] = other == rank_ ? own_part : to(other, sum.bytes);
      if (other == rank_) continue;
      pull.copy[pull.count++] = {.source = from(other, sum.bytes),
                                 .target = sum.parts + other * sum.bytes,
                                 .row_bytes = sum.bytes};
    }
    launch_part_sum(own, sum.dtype, sum.blocks, stream);
    meet(stream);
    launch_copies(pull, sum.blocks, stream);
  }

  void abort() noexcept override { *halt_ = static_cast<int>(Halt::kAborted); }

  Halt halted() const noexcept override { return static_cast<Halt>(*halt_); }

  int device() const override { return device_; }

  int64_t side_bytes() const override { return side_bytes_; }

 private:
  int ranks() const { return static_cast<int>(of_rank_.size()); }

  int64_t side() const { return kHeadBytes + static_cast<int64_t>(number_ % 2) * side_bytes_; }

  // Where this rank's message to another one goes, and another one's comes, in this exchange.
  std::byte* to(int other, int64_t slot_bytes) const {
    return of_rank_[static_cast<size_t>(other)] + side() + rank_ * slot_bytes;
  }

  const std::byte* from(int other, int64_t slot_bytes) const {
    return memory_ + side() + other * slot_bytes;
  }

  void meet(cudaStream_t stream) const {
    Meeting meeting{};
    meeting.number = number_;
    meeting.halt = halt_on_device_;
    meeting.limit_cycles = limit_cycles_;
    meeting.ranks = ranks();
    meeting.rank = rank_;
    for (size_t other = 0; other < of_rank_.size(); ++other) {
      meeting.theirs[other] = reinterpret_cast<uint64_t*>(of_rank_[other] + rank_ * kFlagStride);
      meeting.ours[other] =
          reinterpret_cast<const uint64_t*>(memory_ + static_cast<int64_t>(other) * kFlagStride);
    }
    launch_meeting(meeting, stream);
  }

  template <typename Rows>
  static int64_t bytes_of(const Rows& rows) {
    return rows.tokens * rows.batch * rows.heads * rows.row_bytes;
  }

  template <typename Rows>
  static bool is_empty(const Rows& rows) {
    return bytes_of(rows) == 0;
  }

  template <typename Rows>
  static void expect_countable(const Rows& rows) {
    expect(bytes_of(rows) <= kMostPieceBytes, "tokens", "a piece of less than 2^31 bytes",
           rows.tokens);
  }

  void check(const Exchange& exchange) const {
    expect(ranks() > 0, "exchange", "a connected one", "none");
    expect(exchange.slot_bytes * ranks() <= side_bytes_, "slot_bytes",
           Parts("at most ", side_bytes_ / ranks()), exchange.slot_bytes);
    for (const RowCopy& copy : exchange.kept) expect_countable(copy);
    for (const auto* pieces : {&exchange.sent, &exchange.received}) {
      const int64_t count = std::ssize(*pieces) + std::ssize(exchange.kept);
      expect(count <= kMostPieces, "pieces", Parts("at most ", kMostPieces), count);
      for (const Piece& piece : *pieces) {
        expect(piece.rank >= 0 && piece.rank < ranks() && piece.rank != rank_, "rank",
               Parts("another one below ", ranks()), piece.rank);
        if (is_empty(piece)) continue;
        const Spacing& spacing = piece.in_message;
        const int64_t end = piece.offset + (piece.tokens - 1) * spacing.token +
                            (piece.batch - 1) * spacing.batch + (piece.heads - 1) * spacing.head +
                            piece.row_bytes;
        expect(end <= exchange.slot_bytes, "slot_bytes", Parts("at least ", end),
               exchange.slot_bytes);
        expect_countable(piece);
      }
    }
  }

  void check(const Sum& sum) const {
    expect(ranks() > 0, "sum", "a connected exchange", "none");
    expect(sum.bytes > 0 && sum.bytes % 16 == 0 && sum.bytes <= kMostPieceBytes, "bytes",
           "a positive multiple of 16 below 2^31", sum.bytes);
    expect(sum.bytes * ranks() <= side_bytes_, "bytes", Parts("at most ", side_bytes_ / ranks()),
           sum.bytes);
    expect(reinterpret_cast<uintptr_t>(sum.parts) % 16 == 0, "parts", "an address on 16 bytes",
           reinterpret_cast<uintptr_t>(sum.parts));
    expect(sum.dtype == DType::kFloat32 || sum.dtype == DType::kBFloat16, "dtype",
           "float32 or bfloat16", name_of(sum.dtype));
  }

  void release() noexcept {
    disconnect();
    if (halt_ != nullptr) cudaFreeHost(const_cast<int*>(halt_));
    if (memory_ != nullptr) cudaFree(memory_);
  }

  int device_ = 0;
  int64_t side_bytes_ = 0;
  int64_t limit_cycles_ = 0;
  std::byte* memory_ = nullptr;
  volatile int* halt_ = nullptr;
  int* halt_on_device_ = nullptr;
  int rank_ = 0;
  uint64_t number_ = 0;              // exchanges so far
  std::vector<std::byte*> of_rank_;  // each rank's memory, as it is seen here
};

}  // namespace

std::unique_ptr<PeerExchange> make_peer_exchange(int device, int64_t side_bytes) {
  expect(side_bytes > 0 && side_bytes % 16 == 0, "side_bytes", "a positive multiple of 16",
         side_bytes);
  return std::make_unique<CudaPeerExchange>(device, side_bytes);
}

}  // namespace oomb::peers
