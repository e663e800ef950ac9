from zplan.planner.ledger import Line
def activation_lines(spec, choice, phases):
    a=spec.arch; at={p:i for i,p in enumerate(phases)}
    bt=choice.micro_batch*choice.seq; e=choice.itemsize
    x=bt*a.hidden*e
    spans=tuple((at[f"forward.blocks.{i}"],at[f"reduce.blocks.{i}"]) for i in range(a.layers))
    saved = x if choice.checkpointing=="full" else x*(8+3*a.ffn//a.hidden)
    L=[Line("act.block.saved",saved,spans,"activations",source="derived"),
       Line("act.loss.logits",bt*a.vocab*(e+4+4),((at["forward.head"],at["backward.head"]),),"activations",source="derived")]
    if choice.checkpointing=="full":
        L.append(Line("act.block.recomputed",x*(8+3*a.ffn//a.hidden),tuple((at[f"backward.blocks.{i}"],at[f"backward.blocks.{i}"]) for i in range(a.layers)),"activations",source="derived"))
    return L
