// Exchanges between GPUs of one host in _C; CUDA builds only.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#if OOMB_WITH_CUDA
#include <array>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "bindings/attention_arguments.h"
#include "bindings/nouns.h"
#include "common/error.h"
#include "peers/peer_exchange.h"
#endif

namespace py = pybind11;

namespace oomb::bindings {

#if OOMB_WITH_CUDA
namespace {

using peers::Exchange;
using peers::PeerExchange;
using peers::Piece;
using peers::RowCopy;
using peers::Spacing;

using Sizes = std::vector<int64_t>;
using Views = std::vector<std::array<int64_t, 5>>;  // address; bytes between tokens, sequences,
                                                    // heads; heads

std::byte* address_of(int64_t address) { return static_cast<std::byte*>(pointer_to(address)); }

int64_t in_words(int64_t bytes) { return (bytes + 15) / 16 * 16; }

Piece flat(int rank, std::byte* tensor, int64_t bytes) {
  return {.rank = rank, .tensor = tensor, .row_bytes = bytes};
}

// From a piece's tensor to where rows of that shape belong.
RowCopy kept(const Piece& piece, std::byte* target, const Spacing& in_target) {
  return {.source = piece.tensor,
          .target = target,
          .in_source = piece.in_tensor,
          .in_target = in_target,
          .tokens = piece.tokens,
          .batch = piece.batch,
          .heads = piece.heads,
          .row_bytes = piece.row_bytes};
}

void all_to_all(PeerExchange& self, int64_t send, const Sizes& send_bytes, int64_t received,
                const Sizes& received_bytes, int rank, int64_t message_bytes, bool same_to_all,
                int64_t stream) {
  Exchange exchange{.slot_bytes = in_words(message_bytes), .stream = pointer_to(stream)};
  std::byte* from = address_of(send);
  std::byte* into = address_of(received);
  for (size_t i = 0; i < send_bytes.size(); ++i) {
    const auto other = static_cast<int>(i);
    const Piece sent = flat(other, from, send_bytes[i]);
    if (other == rank) {
      exchange.kept.push_back(kept(sent, into, {}));
    } else {
      exchange.sent.push_back(sent);
      exchange.received.push_back(flat(other, into, received_bytes.at(i)));
    }
    if (!same_to_all) from += send_bytes[i];
    into += received_bytes.at(i);
  }
  self.exchange(exchange);
}

// Messages [tokens][batch][heads of all tensors], a row of `row_bytes` for each.
struct HeadMessages {
  int64_t batch, heads, row_bytes;

  Spacing spacing() const {
    return {.token = batch * heads * row_bytes, .batch = heads * row_bytes, .head = row_bytes};
  }

  // Heads of a view, from `first` on, behind those of the views before it.
  Piece piece(int rank, const std::array<int64_t, 5>& view, int64_t first_token, int64_t first_head,
              int64_t heads_before, int64_t tokens, int64_t heads_here) const {
    const auto& [address, token, sequence, head, all] = view;
    return {.rank = rank,
            .tensor = address_of(address + first_token * token + first_head * head),
            .offset = heads_before * row_bytes,
            .in_tensor = {.token = token, .batch = sequence, .head = head},
            .in_message = spacing(),
            .tokens = tokens,
            .batch = batch,
            .heads = heads_here,
            .row_bytes = row_bytes};
  }
};

int64_t heads_of(const Views& views) {
  return std::accumulate(views.begin(), views.end(), int64_t{0},
                         [](int64_t sum, const auto& view) { return sum + view[4]; });
}

void to_heads(PeerExchange& self, const Views& tensors, int64_t received, const Sizes& tokens,
              int rank, int64_t batch, int64_t row_bytes, int64_t message_bytes, int64_t stream) {
  const auto ranks = static_cast<int64_t>(tokens.size());
  Exchange exchange{.slot_bytes = in_words(message_bytes), .stream = pointer_to(stream)};
  const HeadMessages messages{batch, heads_of(tensors) / ranks, row_bytes};
  std::byte* into = address_of(received);
  for (int other = 0; other < ranks; ++other) {
    int64_t before = 0;
    for (const auto& view : tensors) {
      const int64_t heads = view[4] / ranks;
      const Piece sent = messages.piece(other, view, 0, other * heads, before,
                                        tokens[static_cast<size_t>(rank)], heads);
      if (other == rank) {
        exchange.kept.push_back(kept(sent, into + sent.offset, sent.in_message));
      } else {
        exchange.sent.push_back(sent);
      }
      before += heads;
    }
    const int64_t bytes = tokens[static_cast<size_t>(other)] * messages.spacing().token;
    if (other != rank) exchange.received.push_back(flat(other, into, bytes));
    into += bytes;
  }
  self.exchange(exchange);
}

void to_tokens(PeerExchange& self, const Views& tensors, const Views& results, const Sizes& tokens,
               int rank, int64_t batch, int64_t row_bytes, int64_t message_bytes, int64_t stream) {
  const auto ranks = static_cast<int>(tokens.size());
  Exchange exchange{.slot_bytes = in_words(message_bytes), .stream = pointer_to(stream)};
  const HeadMessages messages{batch, heads_of(tensors), row_bytes};
  int64_t first_token = 0;
  for (int other = 0; other < ranks; ++other) {
    const int64_t theirs = tokens[static_cast<size_t>(other)];
    int64_t before = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const int64_t heads = tensors[i][4];
      const Piece sent = messages.piece(other, tensors[i], first_token, 0, before, theirs, heads);
      const Piece received = messages.piece(other, results.at(i), 0, other * heads, before,
                                            tokens[static_cast<size_t>(rank)], heads);
      if (other == rank) {
        exchange.kept.push_back(kept(sent, received.tensor, received.in_tensor));
      } else {
        exchange.sent.push_back(sent);
        exchange.received.push_back(received);
      }
      before += heads;
    }
    first_token += theirs;
  }
  self.exchange(exchange);
}

void sum(PeerExchange& self, int64_t parts, int64_t bytes, const std::string& dtype, int blocks,
         int64_t stream) {
  self.sum({.parts = address_of(parts),
            .bytes = bytes,
            .dtype = nouns::dtype_from_name(dtype),
            .blocks = blocks,
            .stream = pointer_to(stream)});
}

}  // namespace
#endif

void bind_peers(py::module_& module) {
#if OOMB_WITH_CUDA
  py::class_<PeerExchange>(module, "PeerExchange",
                           "Exchanges between GPUs of one host whose processes write into one\n"
                           "another's memory. side_bytes: room for one exchange; there are two.")
      .def(py::init(&peers::make_peer_exchange), py::kw_only(), py::arg("device"),
           py::arg("side_bytes"))
      .def(
          "begin",
          [](PeerExchange& self, double timeout_seconds) {
            return py::bytes(self.begin(timeout_seconds));
          },
          py::kw_only(), py::arg("timeout_seconds"))
      .def("connect", &PeerExchange::connect, py::kw_only(), py::arg("rank"), py::arg("handles"))
      .def("disconnect", &PeerExchange::disconnect)
      .def("all_to_all", &all_to_all, py::kw_only(), py::arg("send"), py::arg("send_bytes"),
           py::arg("received"), py::arg("received_bytes"), py::arg("rank"),
           py::arg("message_bytes"), py::arg("same_to_all") = false, py::arg("stream"))
      .def("to_heads", &to_heads, py::kw_only(), py::arg("tensors"), py::arg("received"),
           py::arg("tokens"), py::arg("rank"), py::arg("batch"), py::arg("row_bytes"),
           py::arg("message_bytes"), py::arg("stream"))
      .def("to_tokens", &to_tokens, py::kw_only(), py::arg("tensors"), py::arg("results"),
           py::arg("tokens"), py::arg("rank"), py::arg("batch"), py::arg("row_bytes"),
           py::arg("message_bytes"), py::arg("stream"))
      .def("sum", &sum, py::kw_only(), py::arg("parts"), py::arg("bytes"), py::arg("dtype"),
           py::arg("blocks") = 0, py::arg("stream"))
      .def("abort", &PeerExchange::abort)
      .def_property_readonly(
          "timed_out",
          [](const PeerExchange& self) { return self.halted() == peers::Halt::kTimedOut; })
      .def_property_readonly("device", &PeerExchange::device)
      .def_property_readonly("side_bytes", &PeerExchange::side_bytes);
#else
  static_cast<void>(module);
#endif
}

}  // namespace oomb::bindings
