/* The rows of a buffer that the heads of a call read or write, with checks of where they lie. */
#ifndef KVEVICT_HEAD_ROWS_H
#define KVEVICT_HEAD_ROWS_H
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

/* Head i has `size(i)` rows, from `begin(i)` on. */
struct HeadRows {
  int64_t heads; /* number of heads; 0 if the arrays are in a GPU's memory: every check passes */
  const int64_t *offset;
  const int32_t *before, *count; /* [heads] each; NULL: all 0 */
  int64_t more;

  int64_t begin(int64_t i) const { return offset[i] + (before ? before[i] : 0); }
  int64_t size(int64_t i) const { return (count ? count[i] : 0) + more; }
  int64_t end(int64_t i) const { return begin(i) + size(i); }

  /* Checks that every head's stored slots, and `more` rows after them, lie within a buffer of `rows` rows. */
  void check_inside(int64_t rows, const char *buffer) const {
    for (int64_t i = 0; i < heads; i++) {
      const bool inside = offset[i] >= 0 && count[i] >= 0 && offset[i] <= rows - count[i] - more;
      STD_TORCH_CHECK(inside, "head ", i, " holds ", count[i], " slots at offset ", offset[i],
                      more ? " and needs room for one more" : "", ", but ", buffer, " has ", rows, " rows");
    }
  }

  /* Checks that no two heads share a row, since the rows are written. */
  void check_apart(const char *buffer) const {
    int64_t last = 0;
    bool ascending = true; /* a cache has its heads in this order */
    for (int64_t i = 0; i < heads; last = end(i), i++) ascending &= offset[i] >= last;
    if (ascending) return;
    std::vector<int64_t> order;
    for (int64_t i = 0; i < heads; i++)
      if (size(i) > 0) order.push_back(i);
    std::sort(order.begin(), order.end(), [this](int64_t i, int64_t j) { return offset[i] < offset[j]; });
    for (size_t i = 1; i < order.size(); i++) {
      const int64_t one = order[i - 1], next = order[i];
      STD_TORCH_CHECK(end(one) <= begin(next), "heads ", std::min(one, next), " and ", std::max(one, next),
                      " share rows of ", buffer, ", which are written");
    }
  }

  /* Returns whether any row of these heads is also a row of x, whose heads are in the same buffer. */
  bool meets(const HeadRows &x) const {
    struct Range {
      int64_t begin, end;
      bool other;
    };
    std::vector<Range> ranges;
    for (int64_t i = 0; i < heads; i++) {
      if (size(i) > 0) ranges.push_back({begin(i), end(i), false});
      if (x.size(i) > 0) ranges.push_back({x.begin(i), x.end(i), true});
    }
    std::sort(ranges.begin(), ranges.end(), [](const Range &a, const Range &b) { return a.begin < b.begin; });
    int64_t ends[2] = {0, 0}; /* the largest end so far: of this object's ranges, of x's ranges */
    for (const Range &range : ranges) {
      if (range.begin < ends[!range.other]) return true;
      ends[range.other] = std::max(ends[range.other], range.end);
    }
    return false;
  }
};

}  // namespace
#endif
