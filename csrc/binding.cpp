/* The part that torch and Python call. Only this file, tensors.h and head_rows.h include torch. ops.def lists the
 * arguments of an op; here they become the op's schema and the code that fills the op's struct of kvevict.h and calls
 * the kernel.
 *
 * It is built on torch's stable headers and Python's limited C API, so one binary serves every torch and CPython that
 * is new enough. Everything that a kernel reads or writes is checked, here against the size of its tensor or by the
 * kernel against its struct, so a wrong call raises. Checks that need the values of tensors (lengths, offsets, indices)
 * are made on the CPU only. */
#include <Python.h>

#include <cstdlib>

#include "tensors.h"

namespace {

#ifdef KVEVICT_CUDA_ARCHS
constexpr const char *cuda_archs = KVEVICT_CUDA_ARCHS;
#define KV_BOTH(op) kv_##op##_cuda_scratch, kv_##op##_cuda
#else
constexpr const char *cuda_archs = "";
#define KV_BOTH(op) nullptr, nullptr
#endif
#define KV_CPU(op) nullptr, nullptr

/* Return what the last rows of attend compute. */
kv_score &observed(kv_attend_score &a) { return a.score; }
kv_error &observed(kv_attend_error &a) { return a.error; }
kv_peak &observed(kv_attend_peak &a) { return a.peak; }

/* Returns the reduction over the heads of a group, or nullptr if the op has none. */
template <typename Args>
const kv_reduce *group_of(Args &a) {
  if constexpr (requires { a.group; }) return &a.group;
  if constexpr (requires { observed(a).group; }) return &observed(a).group;
  return nullptr;
}

/* Puts each size of ops.def into the field of the same name, if the struct has one, and the first tensor's dtype into
 * `dtype`. */
template <typename Args>
void put_sizes(Args &a, const Call &call) {
#define KV_PUT(X) \
  if constexpr (requires { a.X = int64_t{}; }) a.X = call.size(sizes::X);
  KV_SIZES(KV_PUT)
  if constexpr (requires { a.dtype; }) a.dtype = dtype_of(call.lead());
  if constexpr (requires { a.rows.B; }) put_sizes(a.rows, call);
  if constexpr (requires { a.attend; }) put_sizes(a.attend, call);
  if constexpr (requires { observed(a); }) put_sizes(observed(a), call);
}

void check_options(const kv_score &a) {
  const bool summed = a.rows.weight || a.term == KV_ENTROPY;
  STD_TORCH_CHECK(a.reduce != KV_MAX || !summed,
                  "reduce is 'max', expected 'sum' or 'mean' with a weight or an entropy");
}

void check_options(const kv_error &a) {
  STD_TORCH_CHECK(a.alpha >= 0, "alpha is ", a.alpha, ", expected a number >= 0");
}

/* Checks what ops.def cannot say: here, for every op, that stored slots lie within their buffers. The overloads check
 * more for some ops. */
template <typename Args>
void check(Args &a, const Call &call) {
  if constexpr (requires { check_options(a); }) check_options(a);
  if constexpr (requires { check_options(observed(a)); }) check_options(observed(a));
  if constexpr (requires { a.rows.slots; })
    call.check_inside(sizes::rows, call.rows_of(a.rows.slots.offset, a.rows.slots.len));
  if constexpr (requires { a.slots; }) call.check_inside(sizes::rows, call.rows_of(a.slots.offset, a.slots.len));
  if constexpr (requires { a.attend; }) {
    const int64_t R = call.size(sizes::R), T = a.attend.T;
    STD_TORCH_CHECK(R <= T, "observers is ", R, ", expected at most the ", T, " rows of q");
    check(a.attend, call);
  }
}

void check(kv_probe &a, const Call &) {
  const bool whole = !a.cos == !a.sin && !a.cos == !a.partner;
  STD_TORCH_CHECK(whole, "of cos, sin and partner some are None; give all three, or none");
}

void check(kv_compact &a, const Call &call) {
  const HeadRows src = call.rows_of(a.src.offset, a.src.len), dst = call.rows_of(a.dst.offset, a.keep);
  for (int64_t i = 0; a.index && i < dst.heads; i++)
    STD_TORCH_CHECK(a.keep[i] <= a.K, "keep is ", a.keep[i], ", but index has ", a.K, " columns");
  call.check_inside(sizes::rows, src);
  call.check_inside(sizes::rows_dst, dst);
  call.check_apart(sizes::rows_dst, dst);
  /* The arrays of dst may be those of src: with the same offsets, or if no row of dst is a row of src. */
  const bool same_offsets = std::equal(src.offset, src.offset + src.heads, dst.offset);
  const bool one_pool = a.src.k == a.dst.k && !dst.meets(src);
  call.check_disjoint(same_offsets || one_pool, offsetof(kv_compact, dst), offsetof(kv_compact, src));
}

void check(kv_decode &a, const Call &call) {
  if (a.C == 0) a.probs = nullptr;
  const bool none = !a.prefix.k, whole = !a.prefix.v == none && !a.prefix.offset == none && !a.prefix.len == none;
  STD_TORCH_CHECK(whole, "of prefix_k, prefix_v, prefix_offset and prefix_len some are None; give all four, or none");
  const HeadRows own = call.rows_of(a.slots.offset, a.slots.len, 1),
                 prefix = call.rows_of(a.prefix.offset, a.prefix.len);
  if (!none) call.check_inside(sizes::rows_prefix, prefix);
  call.check_inside(sizes::rows, own);
  call.check_apart(sizes::rows, own);
  /* held_k and held_v may be the arrays prefix_k and prefix_v, if no new row is a row of the prefix. */
  const bool one_pool = !none && a.prefix.k == a.slots.k && !call.row_after(a.slots.offset, a.slots.len).meets(prefix);
  call.check_disjoint(one_pool, offsetof(kv_decode, slots), offsetof(kv_decode, prefix));
}

/* Runs an op as torch calls it: the arguments lie on torch's stack, and the results take their place. */
template <typename Args>
void called(Arguments args, const Kernels<Args> &kernels, StableIValue *stack) {
  Args a = {};
  Call call(args, stack);
  call.read(&a);
  put_sizes(a, call);
  if (const kv_reduce *group = group_of(a))
    call.set_size(sizes::heads, call.size(*group == KV_NONE ? sizes::H : sizes::Hkv));
  call.make_results(&a);
  check(a, call);
  call.run(a, kernels);
  call.give_results();
}

#define KV_CALLED(op, where)                                                                      \
  void call_##op(StableIValue *stack, uint64_t, uint64_t) {                                       \
    called(tables::op::args, Kernels<kv_##op>{kv_##op##_check, kv_##op##_cpu, where(op)}, stack); \
  }
KV_BOTH_OPS(KV_CALLED, KV_BOTH)
KV_CPU_OPS(KV_CALLED, KV_CPU)

using Library = torch::stable::detail::StableLibrary;

#define KV_DEFINE(op, library) library.def(schema(#op, tables::op::args).c_str());
#define KV_IMPLEMENT(op, library) library.impl(#op, call_##op);

/* Registers the ops at the first import. STABLE_TORCH_LIBRARY would do so when the library is loaded; there a second
 * copy of the library can only crash, since torch refuses to register a name twice. Returns whether this copy of the
 * library is the registered one. */
bool registered() {
  static const bool done = [] {
    TorchLibraryHandle name;
    if (aoti_torch_library_init_def("kvevict", __FILE__, __LINE__, &name) != 0) return false;
    static Library all(Library::Kind::FRAGMENT, "kvevict", nullptr, __FILE__, __LINE__);
    static Library cpu(Library::Kind::IMPL, "kvevict", "CPU", __FILE__, __LINE__);
    KV_OPS(KV_DEFINE, all)
    KV_OPS(KV_IMPLEMENT, cpu)
#ifdef KVEVICT_CUDA_ARCHS
    static Library cuda(Library::Kind::IMPL, "kvevict", "CUDA", __FILE__, __LINE__);
    KV_BOTH_OPS(KV_IMPLEMENT, cuda)
#endif
    return true;
  }();
  return done;
}

PyObject *cpu_isa(PyObject *, PyObject *) {
  const char *name = kv_cpu_isa();
  if (name) return PyUnicode_FromString(name);
  return PyErr_Format(PyExc_ValueError, "KVEVICT_CPU_ISA is '%s', expected one of: %s", std::getenv("KVEVICT_CPU_ISA"),
                      kv_cpu_isas());
}

PyObject *cpu_isas(PyObject *, PyObject *) { return PyUnicode_FromString(kv_cpu_isas()); }

PyObject *build_info(PyObject *, PyObject *) {
  return Py_BuildValue("{s:O,s:s,s:s}", "cuda", *cuda_archs ? Py_True : Py_False, "cuda_archs", cuda_archs,
                       "torch_target", "2.10");
}

/* Returns a line of text for each row of ops.def: op, kind, type, name, dtype, sizes or words, with tabs between. */
PyObject *ops(PyObject *, PyObject *) {
  std::string text;
  const auto add = [&](const char *op, Arguments args) {
    for (const Arg &x : args) {
      for (const char *word :
           {op, kind_names[static_cast<size_t>(x.kind)], x.type, x.name, dtype_names[static_cast<size_t>(x.element)]})
        text += word + std::string("\t");
      text += x.text + std::string("\n");
    }
  };
#define KV_ADD(op, with) add(#op, tables::op::args);
  KV_OPS(KV_ADD, )
  return PyUnicode_FromString(text.c_str());
}

PyMethodDef methods[] = {
    {"cpu_isa", cpu_isa, METH_NOARGS,
     "Instruction set that the CPU kernels run with, of amxbf16, avx512bf16, avx512, avx2, scalar or neonbf16, neon."},
    {"cpu_isas", cpu_isas, METH_NOARGS, "Those that this build has, from the least to the most, between spaces."},
    {"build_info", build_info, METH_NOARGS, "What this binary was built with: {cuda, cuda_archs, torch_target}."},
    {"ops", ops, METH_NOARGS, "The rows of ops.def in lines of op, kind, type, name, dtype, text, with tabs between."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "kvevict._C", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

/* Makes a module object; when Python imports the module again, the ops stay registered. */
PyMODINIT_FUNC PyInit__C() {
  if (registered()) return PyModuleDef_Init(&module);
  PyErr_SetString(PyExc_ImportError, "another copy of kvevict's compiled part is in use in this process");
  return nullptr;
}
