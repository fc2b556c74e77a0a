/* How binding.cpp reads tensors: every argument of an op is checked for device, dtype, shape and layout as its
 * address is taken, and the kernel of the right device is run. */
#ifndef KVEVICT_TENSORS_H
#define KVEVICT_TENSORS_H
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "kvevict.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Shape = std::initializer_list<int64_t>;

template <typename T>
constexpr ScalarType scalar_of = ScalarType::Float;
template <>
constexpr ScalarType scalar_of<int32_t> = ScalarType::Int;
template <>
constexpr ScalarType scalar_of<int64_t> = ScalarType::Long;

template <typename Sizes>
std::string shape_text(const Sizes &sizes) {
  std::string text = "[";
  for (int64_t size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

bool is_none(const Tensor &t) { return t.dim() == 1 && t.numel() == 0; }

kv_dtype dtype_of(const Tensor &t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return KV_F32;
    case ScalarType::Half:
      return KV_F16;
    case ScalarType::BFloat16:
      return KV_BF16;
    default:
      STD_TORCH_CHECK(false, "no kernel for ", toString(t.scalar_type()), ", only float32, float16 and bfloat16");
  }
}

/* An option as one of the values 0 .. last of its enum: the schema's int64 must not be cut to one. */
template <typename Enum>
Enum option(const char *name, int64_t value, Enum last) {
  STD_TORCH_CHECK(0 <= value && value <= last, name, " is ", value, ", expected 0..", static_cast<int>(last));
  return static_cast<Enum>(value);
}

/* Sizes of a four-dimensional tensor, for the op to name. */
const int64_t *sizes4(const char *name, const Tensor &t) {
  STD_TORCH_CHECK(t.dim() == 4, name, " has ", t.dim(), " dimensions, expected 4");
  return t.sizes().data();
}

void parallel(int64_t n, int64_t grain, kv_body body, void *ctx) {
  torch::stable::parallel_for(0, n, grain, [=](int64_t begin, int64_t end) { body(ctx, begin, end); });
}

/* torch's pool may have been resized since the last call. */
void set_threads() { kv_set_parallel(parallel, static_cast<int>(torch::stable::get_num_threads())); }

#ifdef KVEVICT_CUDA_ARCHS
/* torch's current stream of a GPU, a cudaStream_t. Nothing here is linked to libtorch_cuda, so that one binary serves
 * torch with and without CUDA: where a CUDA tensor exists, the library is loaded. */
void *current_stream(int32_t device) {
  using Get = AOTITorchError (*)(int32_t, void **);
  static const Get get = [] {
    void *library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library ? reinterpret_cast<Get>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  STD_TORCH_CHECK(get, "this torch cannot name its CUDA stream; install torch 2.10 or newer with CUDA");
  void *stream = nullptr;
  TORCH_ERROR_CODE_CHECK(get(device, &stream));
  return stream;
}
#endif

/* The memory that an argument lies in. */
struct Bytes {
  const char *begin, *end;
};

Bytes dense_bytes(const void *x, int64_t bytes) {
  return {static_cast<const char *>(x), static_cast<const char *>(x) + bytes};
}

/* [n0, n1, n2, D] with those strides; of nothing, nothing. */
Bytes row_bytes(const void *x, Shape shape, const int64_t *stride, int64_t size) {
  const int64_t *n = shape.begin();
  const int64_t rows = n[0] * n[1] * n[2];
  const int64_t last = (n[0] - 1) * stride[0] + (n[1] - 1) * stride[1] + (n[2] - 1) * stride[2] + n[3];
  return dense_bytes(x, rows ? last * size : 0);
}

/* What is written may not lie in what else is written or read. */
void check_disjoint(std::initializer_list<Bytes> written, std::initializer_list<Bytes> others) {
  auto apart = [](Bytes x, Bytes y) {
    return x.begin == x.end || y.begin == y.end || x.end <= y.begin || y.end <= x.begin;
  };
  bool all = true;
  for (const Bytes *x = written.begin(); x < written.end(); x++) {
    for (const Bytes *y = x + 1; y < written.end(); y++) all &= apart(*x, *y);
    for (const Bytes &y : others) all &= apart(*x, y);
  }
  STD_TORCH_CHECK(all, "the slots that are written share memory with each other or with what is read");
}

template <typename Args>
struct Kernels {
  kv_status (*check)(const Args *, int counts);
  kv_status (*cpu)(const Args *);
  int64_t (*cuda_scratch)(const Args *);
  int (*cuda)(const Args *, void *scratch, void *stream);
};

/* One call of an op: it runs where its first tensor is, and so must be all others. A GPU is current while this
 * lives. */
class Call {
 public:
  explicit Call(const Tensor &lead) : cuda_(lead.is_cuda()), index_(lead.get_device_index()) {
    if (cuda_) guard_.emplace(index_);
  }

  bool on_cpu() const { return !cuda_; }

  /* A contiguous array. */
  void *data(const char *name, const Tensor &t, ScalarType type, Shape shape) const {
    check_kind(name, t, type);
    check_shape(name, t, shape);
    STD_TORCH_CHECK(t.is_contiguous(), name, " is not contiguous");
    return t.data_ptr();
  }

  template <typename T>
  T *array(const char *name, const Tensor &t, Shape shape) const {
    return static_cast<T *>(data(name, t, scalar_of<T>, shape));
  }

  /* A buffer of slots, [rows, D]. */
  void *slots(const char *name, const Tensor &t, ScalarType type, int64_t rows, int64_t D) const {
    void *x = data(name, t, type, {rows, D});
    STD_TORCH_CHECK(!needs_alignment() || reinterpret_cast<uintptr_t>(x) % 16 == 0, name,
                    " does not start at a multiple of 16 bytes");
    return x;
  }

  /* [b, h, row, D] of any strides. What no kernel reads, a last dimension that is not dense and on a GPU rows that
   * do not start at multiples of 16 bytes, is copied into `t`. */
  const void *rows(const char *name, Tensor &t, ScalarType type, Shape shape, int64_t *stride) const {
    check_kind(name, t, type);
    check_shape(name, t, shape);
    if (t.stride(3) != 1) t = torch::stable::contiguous(t);
    if (needs_alignment() && !aligned(t)) t = torch::stable::clone(t);
    /* Of a single row the stride may be anything; where no row is, copies of nothing are to be aligned too. */
    for (int64_t d = 0; d < 3; d++) stride[d] = t.size(d) < 2 ? 0 : t.stride(d);
    /* Of heads and steps the GPU's kernels have 32 bits, in bytes. */
    const int64_t most = INT32_MAX / static_cast<int64_t>(t.element_size());
    STD_TORCH_CHECK(on_cpu() || (stride[1] <= most && stride[2] <= most), name,
                    " has rows more than 2 GiB apart; read the prompt in chunks");
    return t.data_ptr();
  }

  /* [B, H, R] floats whose rows of R are dense; stride gets those of b and h. */
  const float *per_row(const char *name, const Tensor &t, const kv_observers &a, int64_t *stride) const {
    check_kind(name, t, ScalarType::Float);
    check_shape(name, t, {a.B, a.H, a.R});
    STD_TORCH_CHECK(a.R < 2 || t.stride(2) == 1, name, "'s last dimension is not dense");
    std::copy_n(t.strides().begin(), 2, stride);
    return static_cast<const float *>(t.data_ptr());
  }

  Tensor empty(ScalarType type, Shape shape) const {
    std::array<int64_t, 4> stride;
    int64_t bytes = 4; /* of a number, at most 4 or, where there is one dimension, 1 */
    for (size_t d = shape.size(); d-- > 0;) {
      stride[d] = bytes / 4;
      STD_TORCH_CHECK(!__builtin_mul_overflow(bytes, std::max<int64_t>(shape.begin()[d], 1), &bytes),
                      "a result of shape ", shape_text(shape), " is too large");
    }
    const int32_t device = cuda_ ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu();
    const auto dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
    AtenTensorHandle handle;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.begin(), stride.data(),
                                                    dtype, device, cuda_ ? index_ : 0, &handle));
    return Tensor(handle);
  }

  /* Head (b, h) owns rows offset .. offset + len + room - 1 of a flat buffer that has `rows`. Not checked on a GPU. */
  void check_slots(const char *name, const int64_t *offset, const int32_t *len, int64_t heads, int64_t rows,
                   int64_t room) const {
    for (int64_t i = 0; on_cpu() && i < heads; i++) {
      bool inside = offset[i] >= 0 && len[i] >= 0 && offset[i] <= rows - len[i] - room;
      STD_TORCH_CHECK(inside, "head ", i, " holds ", len[i], " slots at offset ", offset[i],
                      room ? " and needs room for one more" : "", ", but ", name, " has ", rows, " rows");
    }
  }

  /* Of rows that are written, as above, no head may own another's. */
  void check_apart(const char *name, const int64_t *offset, const int32_t *len, int64_t heads, int64_t room) const {
    if (!on_cpu()) return;
    int64_t end = 0;
    bool ascending = true; /* as caches have them */
    for (int64_t i = 0; i < heads; end = offset[i] + len[i] + room, i++) ascending &= offset[i] >= end;
    if (ascending) return;
    std::vector<int64_t> order;
    for (int64_t i = 0; i < heads; i++)
      if (len[i] + room > 0) order.push_back(i);
    std::sort(order.begin(), order.end(), [=](int64_t i, int64_t j) { return offset[i] < offset[j]; });
    for (size_t i = 1; i < order.size(); i++) {
      const int64_t one = order[i - 1], next = order[i];
      STD_TORCH_CHECK(offset[one] + len[one] + room <= offset[next], "heads ", std::min(one, next), " and ",
                      std::max(one, next), " share rows of ", name, ", which are written");
    }
  }

  template <typename Args>
  void run(const Args &a, const Kernels<Args> &kernels) const {
    const kv_status status = on_cpu() ? (set_threads(), kernels.cpu(&a)) : kernels.check(&a, 0);
    STD_TORCH_CHECK(status == KV_OK, kv_status_text(status));
#ifdef KVEVICT_CUDA_ARCHS
    if (on_cpu()) return;
    Tensor scratch = empty(ScalarType::Byte, {kernels.cuda_scratch(&a)});
    const int error = kernels.cuda(&a, scratch.data_ptr(), current_stream(index_));
    STD_TORCH_CHECK(error == 0, "CUDA: ", kv_cuda_text(error));
#endif
  }

 private:
#ifdef KVEVICT_ON_CPU /* the CUDA kernels stand in for the CPU's */
  static constexpr bool needs_alignment() { return true; }
#else
  bool needs_alignment() const { return cuda_; }
#endif

  static bool aligned(const Tensor &t) {
    bool all = reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0;
    for (int64_t d = 0; d < 3; d++)
      all &= t.size(d) < 2 || t.stride(d) * static_cast<int64_t>(t.element_size()) % 16 == 0;
    return all;
  }

  void check_kind(const char *name, const Tensor &t, ScalarType type) const {
    STD_TORCH_CHECK(cuda_ ? t.is_cuda() && t.get_device_index() == index_ : t.is_cpu(), name, " is not on ",
                    cuda_ ? "the same GPU as the first tensor" : "the CPU");
    STD_TORCH_CHECK(t.scalar_type() == type, name, " is ", toString(t.scalar_type()), ", expected ", toString(type));
  }

  static void check_shape(const char *name, const Tensor &t, Shape shape) {
    auto sizes = t.sizes();
    bool same = sizes.size() == shape.size() && std::equal(shape.begin(), shape.end(), sizes.begin());
    STD_TORCH_CHECK(same, name, " has shape ", shape_text(sizes), ", expected ", shape_text(shape));
  }

  bool cuda_;
  int32_t index_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

}  // namespace
#endif
