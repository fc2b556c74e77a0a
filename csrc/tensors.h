/* Reads the arguments of an op for binding.cpp. Each argument is checked for the device, dtype, shape and layout in
 * ops.def, and its address is put into the op's struct of kvevict.h. Then the kernel for the arguments' device is
 * run. */
#ifndef KVEVICT_TENSORS_H
#define KVEVICT_TENSORS_H
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstring>
#include <optional>

#include "head_rows.h"
#include "table.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename Sizes>
std::string shape_text(const Sizes &sizes) {
  std::string text = "[";
  for (int64_t size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

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

void parallel(int64_t n, int64_t grain, kv_body body, void *ctx) {
  torch::stable::parallel_for(0, n, grain, [=](int64_t begin, int64_t end) { body(ctx, begin, end); });
}

/* Gives the kernels torch's number of threads. Called before every op, since torch's pool may have been resized. */
void set_threads() { kv_set_parallel(parallel, static_cast<int>(torch::stable::get_num_threads())); }

#ifdef KVEVICT_CUDA_ARCHS
/* Returns torch's current stream of a GPU, a cudaStream_t. This extension is not linked to libtorch_cuda, so that one
 * binary serves torch with and without CUDA. If a CUDA tensor exists, that library is loaded, and the function is found
 * there. */
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

template <typename T>
void put(void *a, size_t at, T value) {
  std::memcpy(static_cast<char *>(a) + at, &value, sizeof value);
}

/* Returns what one of torch's C functions says about a tensor, without the detour over the enums of torch's headers. */
int32_t asked(AOTITorchError (*get)(AtenTensorHandle, int32_t *), const Tensor &t) {
  int32_t value;
  TORCH_ERROR_CODE_CHECK(get(t.get(), &value));
  return value;
}

int32_t code_of(ScalarType type) { return torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)); }

/* The memory of a tensor: bytes begin .. end - 1; empty if the tensor has no elements. */
struct Bytes {
  const char *begin = nullptr, *end = nullptr;
  bool meets(Bytes x) const { return begin != end && x.begin != x.end && begin < x.end && x.begin < end; }
};

template <typename Args>
struct Kernels {
  kv_status (*check)(const Args *, int counts);
  kv_status (*cpu)(const Args *);
  int64_t (*cuda_scratch)(const Args *);
  int (*cuda)(const Args *, void *scratch, void *stream);
};

/* One call of an op. All its tensors must be on the device of the first one. If that is a GPU, it is CUDA's current
 * device while this object lives. */
class Call {
 public:
  /* Takes every tensor off torch's stack before anything is checked: tensors that an error leaves there are never
   * freed. */
  Call(Arguments args, StableIValue *stack) : args_(args), stack_(stack) {
    for (size_t i = 0; i < args_.size(); i++) {
      if (!args_[i].is_tensor()) continue;
      if (args_[i].is_optional())
        tensors_[i] = torch::stable::detail::to<std::optional<Tensor>>(stack[i]);
      else
        tensors_[i] = torch::stable::detail::to<Tensor>(stack[i]);
    }
    device_ = asked(aoti_torch_get_device_type, lead()), cuda_ = device_ == aoti_torch_device_type_cuda();
    index_ = lead().get_device_index(), type_ = lead().scalar_type();
    if (cuda_) guard_.emplace(index_);
    size_.fill(-1), size_[sizes::one] = 1;
  }

  bool on_cpu() const { return !cuda_; }
  const Tensor &lead() const { return *tensors_[0]; }
  int64_t size(uint8_t which) const { return std::max<int64_t>(size_[which], 0); }
  void set_size(uint8_t which, int64_t value) { size_[which] = value; }

  /* Checks the arguments and puts them into the struct `a` of the op; a field whose argument is None stays NULL. */
  void read(void *a) {
    for (size_t i = 0; i < args_.size(); i++) {
      const Arg &x = args_[i];
      switch (x.kind) {
        case Kind::tensor:
        case Kind::rows:
        case Kind::slots:
          if (tensors_[i]) read_tensor(i, a);
          break;
        case Kind::number:
          put(a, x.at, static_cast<float>(torch::stable::detail::to<double>(stack_[i])));
          break;
        case Kind::flag:
          put<int>(a, x.at, torch::stable::detail::to<bool>(stack_[i]));
          break;
        case Kind::count:
          size_[x.shape[0]] = torch::stable::detail::to<int64_t>(stack_[i]);
          STD_TORCH_CHECK(size_[x.shape[0]] >= 0, x.name, " is ", size_[x.shape[0]]);
          break;
        case Kind::integer:
        case Kind::choice: { /* checked as the schema's int64, before it is cut to the field's int */
          const int64_t value = torch::stable::detail::to<int64_t>(stack_[i]);
          const bool known = x.least <= value && value <= x.most;
          STD_TORCH_CHECK(known, x.name, " is ", value, ", expected ", x.least, "..", x.most);
          put(a, x.at, static_cast<int>(value));
          break;
        }
        case Kind::result:
          break;
      }
    }
  }

  /* Allocates the results. All sizes are known by now, from the arguments. */
  void make_results(void *a) {
    for (size_t i = 0; i < args_.size(); i++) {
      const Arg &x = args_[i];
      if (x.kind != Kind::result) continue;
      std::array<int64_t, 4> shape;
      for (size_t d = 0; d < x.rank(); d++) shape[d] = size(x.shape[d]);
      tensors_[i] = empty(type_of(x), {shape.data(), x.rank()});
      put(a, x.at, tensors_[i]->data_ptr());
    }
  }

  template <typename Args>
  void run(const Args &a, const Kernels<Args> &kernels) const {
    const kv_status status = on_cpu() ? (set_threads(), kernels.cpu(&a)) : kernels.check(&a, 0);
    STD_TORCH_CHECK(status == KV_OK, kv_status_text(status));
#ifdef KVEVICT_CUDA_ARCHS
    if (on_cpu()) return;
    const int64_t bytes = kernels.cuda_scratch(&a);
    Tensor scratch = empty(ScalarType::Byte, {&bytes, 1});
    const int error = kernels.cuda(&a, scratch.data_ptr(), current_stream(index_));
    STD_TORCH_CHECK(error == 0, "CUDA: ", kv_cuda_text(error));
#endif
  }

  void give_results() const {
    StableIValue *top = stack_;
    for (size_t i = 0; i < args_.size(); i++)
      if (args_[i].kind == Kind::result) *top++ = torch::stable::detail::from(*tensors_[i]);
  }

  /* rows_of returns for every head i the rows offset[i] .. offset[i] + count[i] + more - 1; row_after returns the one
   * row offset[i] + len[i], which follows the head's slots. */
  HeadRows rows_of(const int64_t *offset, const int32_t *count, int64_t more = 0) const {
    return {heads_to_check(), offset, nullptr, count, more};
  }
  HeadRows row_after(const int64_t *offset, const int32_t *len) const {
    return {heads_to_check(), offset, len, nullptr, 1};
  }

  /* Check the heads' rows x in the buffers whose number of rows is the size `rows` of ops.def. */
  void check_inside(uint8_t rows, const HeadRows &x) const { x.check_inside(size(rows), buffer(rows)); }
  void check_apart(uint8_t rows, const HeadRows &x) const { x.check_apart(buffer(rows)); }

  /* Checks that no written argument shares memory with another argument. If `is_shared`, there is one exception: a
   * field of the kv_slots at offset `written` of the struct may be the same array as that field of the kv_slots at
   * offset `read`. */
  void check_disjoint(bool is_shared, size_t written, size_t read) const {
    for (size_t i = 0; i < args_.size(); i++) {
      if (!args_[i].is_tensor() || !args_[i].is_written()) continue;
      for (size_t j = 0; j < args_.size(); j++) {
        const bool met = j != i && memory_[i].meets(memory_[j]), same = memory_[i].begin == memory_[j].begin;
        const bool may_meet = is_shared && same && args_[i].at - written == args_[j].at - read;
        STD_TORCH_CHECK(!met || may_meet, args_[i].name, ", which is written, and ", args_[j].name, " share memory");
      }
    }
  }

 private:
#ifdef KVEVICT_ON_CPU /* in tests the CUDA kernels run on the CPU, in place of the CPU's kernels */
  static constexpr bool needs_alignment() { return true; }
#else
  bool needs_alignment() const { return cuda_; }
#endif

  int64_t heads_to_check() const { return on_cpu() ? size(sizes::B) * size(sizes::Hkv) : 0; }

  ScalarType type_of(const Arg &x) const {
    constexpr ScalarType of[] = {ScalarType::Undefined, ScalarType::Int, ScalarType::Long, ScalarType::Float};
    return x.element == Element::call ? type_ : of[static_cast<size_t>(x.element)];
  }

  void read_tensor(size_t i, void *a) {
    const Arg &x = args_[i];
    Tensor &t = *tensors_[i];
    STD_TORCH_CHECK(asked(aoti_torch_get_device_type, t) == device_ && (!cuda_ || t.get_device_index() == index_),
                    x.name, " is not on ", cuda_ ? "the same GPU as the first tensor" : "the CPU");
    const kv_kind kind = kind_of(x, a);
    const bool packed = kind != KV_AS_COMPUTED;
    const ScalarType type = packed ? ScalarType::Byte : type_of(x);
    STD_TORCH_CHECK(asked(aoti_torch_get_dtype, t) == code_of(type), x.name, " is ", toString(t.scalar_type()),
                    ", expected ", toString(type));
    STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(t.data_ptr()) % t.element_size() == 0, x.name,
                    " does not start at a multiple of its element size, ", t.element_size(), " bytes; pass a clone");
    read_shape(x, t, packed);
    const int64_t bytes = packed ? kv_packed_bytes(kind, size(sizes::D)) : 0;
    STD_TORCH_CHECK(!packed || t.size(1) == bytes, x.name, " has rows of ", t.size(1), " bytes, expected ", bytes,
                    " for a head dimension of ", size(sizes::D), " in kind ", static_cast<int>(kind));
    const bool slots = x.element == Element::call && !packed;
    if (x.kind == Kind::rows && t.stride(t.dim() - 1) != 1) t = torch::stable::contiguous(t);
    if (x.kind == Kind::rows && slots && needs_alignment() && !aligned(t)) t = torch::stable::clone(t);
    memory_[i] = read_layout(x, t, a);
    const uintptr_t unit = packed ? 4 : slots && x.kind != Kind::rows ? 16 : 1;
    STD_TORCH_CHECK(!needs_alignment() || reinterpret_cast<uintptr_t>(memory_[i].begin) % unit == 0, x.name,
                    " does not start at a multiple of ", unit, " bytes");
    /* An array without elements may have no address, but NULL in the struct means None: any other address is put
     * there. */
    put<const void *>(a, x.at, memory_[i].begin ? memory_[i].begin : a);
  }

  /* Returns the storage format of an argument's rows. For stored slots it is the argument before them, which is already
   * in the struct a. */
  static kv_kind kind_of(const Arg &x, const void *a) {
    kv_kind kind = KV_AS_COMPUTED;
    if (x.kind == Kind::slots) std::memcpy(&kind, static_cast<const char *>(a) + x.kind_at, sizeof kind);
    return kind;
  }

  void read_shape(const Arg &x, const Tensor &t, bool packed) {
    const auto have = t.sizes();
    bool same = have.size() == x.rank();
    for (size_t d = 0; same && d < have.size() - packed; d++) {
      int64_t &want = size_[x.shape[d]];
      if (want < 0) want = have[d];
      same = want == have[d];
    }
    if (same) return;
    std::string wanted;
    for (size_t d = 0; d < x.rank(); d++) {
      const int64_t size = size_[x.shape[d]];
      wanted += (d ? ", " : "") + (size < 0 ? std::string(size_names[x.shape[d]]) : std::to_string(size));
    }
    STD_TORCH_CHECK(false, x.name, " has shape ", shape_text(have), ", expected [", wanted, "]");
  }

  /* Returns the memory of a tensor and puts the tensor's strides into the struct. If the struct has no field for them,
   * the tensor must be dense. */
  Bytes read_layout(const Arg &x, const Tensor &t, void *a) const {
    const auto sizes = t.sizes(), strides = t.strides();
    const int64_t element = static_cast<int64_t>(t.element_size());
    int64_t last = 0, elements = 1;
    bool dense = true;
    for (size_t d = sizes.size(); d-- > 0; elements *= sizes[d]) {
      /* A dimension of size 0 or 1 may have any stride. It counts as 0, since even copies of nothing must be
       * aligned. */
      const int64_t stride = sizes[d] < 2 ? 0 : strides[d];
      dense &= sizes[d] < 2 || stride == elements;
      last += (sizes[d] - 1) * stride;
      if (d >= x.strides) continue;
      /* CUDA kernels hold the strides of heads and steps in 32 bits, as bytes. */
      STD_TORCH_CHECK(on_cpu() || d == 0 || stride <= INT32_MAX / element, x.name,
                      " has rows more than 2 GiB apart; read the prompt in chunks");
      put(a, x.stride_at + d * sizeof stride, stride);
    }
    STD_TORCH_CHECK(dense || x.strides || !elements, x.name, " is not contiguous");
    const char *begin = static_cast<const char *>(t.data_ptr());
    return {begin, elements ? begin + (last + 1) * element : begin};
  }

  static bool is_aligned(const void *x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; }

  /* Returns whether every row starts at a multiple of 16 bytes. */
  static bool aligned(const Tensor &t) {
    bool all = is_aligned(t.data_ptr());
    for (int64_t d = 0; d < t.dim() - 1; d++)
      all &= t.size(d) < 2 || t.stride(d) * static_cast<int64_t>(t.element_size()) % 16 == 0;
    return all;
  }

  Tensor empty(ScalarType type, std::span<const int64_t> shape) const {
    std::array<int64_t, 4> stride;
    int64_t bytes = 4; /* counts 4 bytes for every number, the most that a result's dtype has */
    bool fits = true;
    for (size_t d = shape.size(); d-- > 0;) {
      stride[d] = bytes / 4;
      fits &= !__builtin_mul_overflow(bytes, std::max<int64_t>(shape[d], 1), &bytes);
    }
    STD_TORCH_CHECK(fits, "a result of shape ", shape_text(shape), " is too large");
    AtenTensorHandle handle;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), stride.data(),
                                                    code_of(type), device_, cuda_ ? index_ : 0, &handle));
    return Tensor(handle);
  }

  /* Returns the name of the first argument whose number of rows is the size `rows`. */
  const char *buffer(uint8_t rows) const {
    return std::find_if(args_.begin(), args_.end(), [=](const Arg &x) { return x.is_tensor() && x.shape[0] == rows; })
        ->name;
  }

  Arguments args_;
  StableIValue *stack_;
  std::array<std::optional<Tensor>, MOST_ROWS> tensors_;
  std::array<Bytes, MOST_ROWS> memory_;
  std::array<int64_t, sizes::count> size_;
  ScalarType type_; /* type_ and all members below describe the first tensor */
  bool cuda_;
  int32_t device_, index_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

}  // namespace
#endif
