"""Functions in LLVM's language that kernels call, for what TVM has no words for. All are inlined."""

#: An identity that LLVM cannot see through and that costs nothing: no instruction, the result is where the argument
#: was.
KEPT = (
    "define linkonce_odr hidden i64 @tvmgemm_kept(i64 %x) alwaysinline nounwind "
    '{ %r = call i64 asm "", "=r,0"(i64 %x) ret i64 %r } '
)

#: The same for an address.
KEPT_POINTER = (
    "define linkonce_odr hidden ptr @tvmgemm_kept_pointer(ptr %x) alwaysinline nounwind "
    '{ %r = call ptr asm "", "=r,0"(ptr %x) ret ptr %r } '
)

#: No instruction. But LLVM takes it for one that it does not know, and does not unroll a loop that holds such.
ROLLED = (
    "define linkonce_odr hidden i32 @tvmgemm_rolled() alwaysinline nounwind "
    '{ call void asm sideeffect "", ""() nounwind memory(inaccessiblemem: readwrite) ret i32 0 } '
)

#: Like ``KEPT``, but LLVM may not move it to another place.
PINNED = (
    "define linkonce_odr hidden i64 @tvmgemm_pinned(i64 %x) alwaysinline nounwind "
    '{ %r = call i64 asm sideeffect "", "=r,0"(i64 %x) nounwind memory(inaccessiblemem: readwrite) ret i64 %r } '
)

#: A prefetch of the cache line at an address, for reading, into all caches.
PREFETCHED = (
    "declare void @llvm.prefetch.p0(ptr, i32, i32, i32) "
    "define linkonce_odr hidden i32 @tvmgemm_prefetched(i64 %x) alwaysinline nounwind "
    "{ %p = inttoptr i64 %x to ptr call void @llvm.prefetch.p0(ptr %p, i32 0, i32 3, i32 1) ret i32 0 } "
)

#: Conversions of single elements that raise the flags of those elements and no others, for x86: see ``Elements``.
HALVES = """
define linkonce_odr hidden float @tvmgemm_widened(i16 %x) alwaysinline nounwind {
  %one = insertelement <8 x i16> poison, i16 %x, i64 0
  %all = shufflevector <8 x i16> %one, <8 x i16> poison, <8 x i32> zeroinitializer
  %halves = bitcast <8 x i16> %all to <8 x half>
  %wide = fpext <8 x half> %halves to <8 x float>
  %kept = call <8 x float> asm "", "=x,0"(<8 x float> %wide)
  %result = extractelement <8 x float> %kept, i64 0
  ret float %result
}
define linkonce_odr hidden i16 @tvmgemm_narrowed(float %x) alwaysinline nounwind {
  %one = insertelement <8 x float> poison, float %x, i64 0
  %all = shufflevector <8 x float> %one, <8 x float> poison, <8 x i32> zeroinitializer
  %narrow = fptrunc <8 x float> %all to <8 x half>
  %bits = bitcast <8 x half> %narrow to <8 x i16>
  %kept = call <8 x i16> asm "", "=x,0"(<8 x i16> %bits)
  %result = extractelement <8 x i16> %kept, i64 0
  ret i16 %result
}
"""

#: A product of pairs of bfloat16 numbers. (TVM would rewrite a vector of its own type bfloat16.)
DOT16 = """
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
define linkonce_odr hidden <16 x float> @tvmgemm_dot16(<16 x float> %c, <16 x i32> %a, <16 x i32> %b) alwaysinline nounwind {
  %x = bitcast <16 x i32> %a to <32 x bfloat>
  %y = bitcast <16 x i32> %b to <32 x bfloat>
  %result = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %c, <32 x bfloat> %x, <32 x bfloat> %y)
  ret <16 x float> %result
}
"""
