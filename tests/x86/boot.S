# The firmware of an emulated machine, at 0xffff0000: it enters 64-bit mode, makes the call that bochs.py has put into memory, and sends
# what it left to port 0xe9. LLVM assembles it; addresses are written as numbers, so that nothing is left to link.
# Memory: tables of pages at 0x100000, the end of the memory in use at 0x104000. Virtual: a stack up to 0xffffffff80200000, the job there,
# zeros that FS points into around 0xffffffff803e0000, and the interrupt table at 0xffffffff803f0000.
rom:
  .p2align 4
gdt:
  .quad 0
  .quad 0x00cf9b000000ffff                # code of 32 bits
  .quad 0x00cf93000000ffff                # data
  .quad 0x00af9b000000ffff                # code of 64 bits
gdtr:
  .short 31
  .long 0xffff0000+gdt-rom

  .code32
protected:
  movw $16, %ax
  movw %ax, %ds
  movw %ax, %es
  movw %ax, %ss
# Bochs has read the image into one piece of the memory that it gives out in blocks of 128 KB, in the order of their first use.
  movl $0x100000, %esi
touch:
  movb (%esi), %al
  addl $0x20000, %esi
  cmpl 0x104000, %esi
  jb touch
  movl $0x100000, %eax
  movl %eax, %cr3
  movl %cr4, %eax
  orl $0x40620, %eax                      # OSXSAVE, OSXMMEXCPT, OSFXSR, PAE
  movl %eax, %cr4
  movl $0xc0000080, %ecx                  # EFER: NXE, LME
  rdmsr
  orl $0x900, %eax
  wrmsr
  movl $0x80000023, %eax                  # PG, NE, MP, PE
  movl %eax, %cr0
  ljmpl $24, $(0xffff0000+long-rom)

  .code64
long:
  movq $0xffffffff80200000, %rbx
  movq %rbx, %rsp
  lidt idtr(%rip)
  xorl %ecx, %ecx
  xorl %edx, %edx
  movl (%rbx), %eax                       # XCR0
  xsetbv
  movl $0xc0000100, %ecx                  # FS base
  movl $0x803e0000, %eax
  movl $0xffffffff, %edx
  wrmsr
  addq $8, %rbx
  movq (%rbx), %rax                       # the function, and three arguments, of which the last becomes the result
  movq 8(%rbx), %rdi
  movq 16(%rbx), %rsi
  movq 24(%rbx), %rdx
  cld
  callq *%rax
  movq %rax, 24(%rbx)
  addq $24, %rbx
report:                                   # the result; address and bytes of each page that was written, and 0
  leaq done(%rip), %rsi
  movl $16, %ecx
  movl $0xe9, %edx
  cld
  rep outsb
  movq $0xffffffff80200020, %rsi
  movl $8, %ecx
  rep outsb
page:                                     # address of a page (0 ends the list), and of its entry in a table
  addq $16, %rbx
  movq (%rbx), %rax
  cmpq $0, -8(%rbx)
  je last
  testb $0x40, (%rax)                     # dirty
  jz page
  leaq -8(%rbx), %rsi
  movl $8, %ecx
  rep outsb
  movq -8(%rbx), %rsi
  movl $4096, %ecx
  rep outsb
  jmp page
last:
  leaq -8(%rbx), %rsi
  movl $8, %ecx
  rep outsb
off:
  leaq shutdown(%rip), %rsi
  movl $8, %ecx
  movl $0x8900, %edx
  rep outsb
  hlt
fault:                                    # the stack has the number, the error code and the place
  leaq failed(%rip), %rsi
  movl $16, %ecx
  movl $0xe9, %edx
  cld
  rep outsb
  movq %cr2, %rax
  pushq %rax
  movq %rsp, %rsi
  movl $32, %ecx
  rep outsb
  jmp off
idtr:
  .short 511
  .quad 0xffffffff803f0000
done:
  .ascii "\0SASHIKO CALLED\0"
failed:
  .ascii "\0SASHIKO FAILED\0"
shutdown:
  .ascii "Shutdown"

  .org 0x8000                             # where exception n goes: 16 n further
  .set n, 0
  .rept 32
  .p2align 4
  .if (n != 8) && (n != 10) && (n != 11) && (n != 12) && (n != 13) && (n != 14) && (n != 17)
  pushq $0                                # it has no error code
  .endif
  pushq $n
  jmp fault
  .set n, n+1
  .endr

  .org 0x9000
  .code16
start:
  cli
  lgdtl %cs:gdtr-rom
  movl %cr0, %eax
  orl $1, %eax
  movl %eax, %cr0
  ljmpl $8, $(0xffff0000+protected-rom)

  .org 0xfff0
  jmp start                               # where a processor begins
  .org 0x10000
