// Flat layouts: where each parameter of a unit lies in the unit's buffer, and how that buffer is cut into shards.
//
// Pure arithmetic. A layout holds the parameters of one unit that share dtype and trainability, ordered by
// param group (stable within a group). Every offset is a multiple of `alignment_numel`; the total is padded so
// that `shard_num` shards are equal and each shard begins aligned.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace zb {

struct ParameterSpan {
  std::string name;
  std::size_t numel = 0;
  int param_group = 0;
  std::size_t offset_numel = 0;  // set by the layout
};

// Elements [begin, end) of a buffer; `row` is the param group whose hyperparameters hold there.
struct Segment {
  std::size_t begin = 0;
  std::size_t end = 0;
  int row = 0;

  bool operator==(const Segment&) const = default;
};

// Those inside [begin, end), relative to begin.
std::vector<Segment> within(const std::vector<Segment>& segments, std::size_t begin, std::size_t end);

class FlatLayout {
 public:
  FlatLayout() = default;
  // Spans are reordered by param group. Throws ArgumentError for shard_num or alignment_numel of zero.
  FlatLayout(std::vector<ParameterSpan> spans, std::size_t shard_num, std::size_t alignment_numel);

  const std::vector<ParameterSpan>& spans() const noexcept { return spans_; }
  std::size_t shard_num() const noexcept { return shard_num_; }
  std::size_t numel() const noexcept { return numel_; }                // of the parameters, no padding
  std::size_t padded_numel() const noexcept { return padded_numel_; }  // of the whole buffer
  std::size_t shard_numel() const noexcept { return padded_numel_ / shard_num_; }

  // Segments of the whole buffer, maximal runs of one param group, padding between two spans of a run included
  // (padding holds zeros, and an update of zeros by zero gradients stays zero). Cover [0, end of last span).
  const std::vector<Segment>& segments() const noexcept { return segments_; }
  std::vector<Segment> segments_within(std::size_t begin, std::size_t end) const;
  // The parts of the buffer that belong to no parameter, in order.
  const std::vector<Segment>& gaps() const noexcept { return gaps_; }

 private:
  std::vector<ParameterSpan> spans_;
  std::vector<Segment> segments_;
  std::vector<Segment> gaps_;
  std::size_t shard_num_ = 1;
  std::size_t numel_ = 0;
  std::size_t padded_numel_ = 0;
};

}  // namespace zb
