/*
 * Switch of stacks, System V ABI. Saves what a callee must keep; x87 and SSE control words are
 * the thread's and are never changed here.
 */
        .text

/* void co_switch(void **save_sp, void *load_sp) */
        .globl  co_switch
        .hidden co_switch
        .type   co_switch, @function
        .p2align 4
co_switch:
        .cfi_startproc
        pushq   %rbp
        .cfi_adjust_cfa_offset 8
        .cfi_rel_offset rbp, 0
        pushq   %rbx
        .cfi_adjust_cfa_offset 8
        .cfi_rel_offset rbx, 0
        pushq   %r12
        .cfi_adjust_cfa_offset 8
        .cfi_rel_offset r12, 0
        pushq   %r13
        .cfi_adjust_cfa_offset 8
        .cfi_rel_offset r13, 0
        pushq   %r14
        .cfi_adjust_cfa_offset 8
        .cfi_rel_offset r14, 0
        pushq   %r15
        .cfi_adjust_cfa_offset 8
        .cfi_rel_offset r15, 0
        movq    %rsp, (%rdi)
        movq    %rsi, %rsp
        popq    %r15
        .cfi_adjust_cfa_offset -8
        .cfi_restore r15
        popq    %r14
        .cfi_adjust_cfa_offset -8
        .cfi_restore r14
        popq    %r13
        .cfi_adjust_cfa_offset -8
        .cfi_restore r13
        popq    %r12
        .cfi_adjust_cfa_offset -8
        .cfi_restore r12
        popq    %rbx
        .cfi_adjust_cfa_offset -8
        .cfi_restore rbx
        popq    %rbp
        .cfi_adjust_cfa_offset -8
        .cfi_restore rbp
        /* A jump, not a return: the return predictor would guess the other stack's caller. */
        popq    %rcx
        .cfi_adjust_cfa_offset -8
        .cfi_register rip, rcx
        jmpq    *%rcx
        .cfi_endproc
        .size   co_switch, . - co_switch

/* First frame of every coroutine: r12 holds the struct co. Unwinders stop here. */
        .globl  co_boot
        .hidden co_boot
        .type   co_boot, @function
        .p2align 4
co_boot:
        .cfi_startproc
        .cfi_undefined rip
        movq    %r12, %rdi
        call    co_main
        ud2
        .cfi_endproc
        .size   co_boot, . - co_boot

        .section .note.GNU-stack, "", @progbits
