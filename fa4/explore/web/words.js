// What the words of the page mean, for people who know attention but not the hardware.

/** [words, meaning]; the site's glossary says more. */
export const WORDS = [
  [
    "SM, CTA",
    "A GPU has many streaming multiprocessors; the 16 warps of 32 threads that run one kernel on an SM are a cooperative thread array. Two CTAs on neighbouring SMs can be a pair.",
  ],
  [
    "warp role",
    "Warps do different work at the same time: load copies, mma asks for products, softmax turns scores into probabilities, correction rescales.",
  ],
  [
    "S, P, O",
    "Scores of a query tile and a key tile, their probabilities, the output. QK0 is the product that makes S of query tile 0, PV0 the one that adds to its O.",
  ],
  [
    "row max, alpha",
    "The largest score of each row so far; when it grows, O is multiplied by alpha. FlashAttention-4 leaves that out while it grows little.",
  ],
  [
    "step",
    "One tile of keys and values for the query tiles of a CTA: what the loop of each role repeats.",
  ],
  [
    "tensor core",
    "The unit that multiplies matrices. Others wait for it, or it waits for them: that is what the kernel's design is about.",
  ],
  [
    "TMEM",
    "Tensor memory: 512 columns beside the tensor core, where S, P and O lie. Only on Blackwell.",
  ],
  [
    "MUFU, FMA, ALU",
    "Units for exponentials, for multiply-adds, and for maxima and integers. An exponential can also be a polynomial on FMA units: \u201cemulated\u201d.",
  ],
  [
    "TMA",
    "Tensor Memory Accelerator: copies whole tiles between global and shared memory while warps do other work.",
  ],
  [
    "barrier, signal",
    "A counter in shared memory (mbarrier): a phase is complete when all have arrived that must; others wait for that. Its parity is the phase's number modulo 2.",
  ],
  [
    "s0_full",
    "Signals are called by what is there when they complete: scores of query tile 0. kv_empty: a place for K or V is free. p0_full_o0_scaled: P of tile 0 is written, and its O is rescaled.",
  ],
  [
    "PV0 head, tail",
    "The product of P and V in two parts, so that it can begin before all of P is there; p0_last is the signal for the rest.",
  ],
  [
    "parity, slot",
    "A ring of places is used in turns; the slot is the one in turn.",
  ],
  [
    "PTX",
    "The instructions that a kernel is compiled to.",
  ],
  [
    "race, deadlock",
    "Two accesses to the same memory that nothing orders; roles that wait for each other for ever.",
  ],
];
