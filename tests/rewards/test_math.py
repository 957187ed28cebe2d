"""What counts as the right answer."""

import random
from fractions import Fraction

import pytest

from birl.errors import BirlError
from birl.rewards.math import math

RIGHT = r"""
3 + 4 = 7|The answer is 7.|7|$7$|\boxed{7}|3 x 4 = 7|x = 7|7 apples|**7**|The answer is **7**.|7.0|$x=7$|$3+4=7$|\[7\]
<answer>7</answer>|<think>8</think><answer>7</answer>|<answer>\boxed{7}</answer>|<answer> 7 </answer> of 8
9 <answer>3 + 4 = 7</answer>
#### 7|So 9 #### 7|#### 7 apples|9\boxed{7}8|$7^\circ$|$7 \text{ cm}^2$|\boxed{x_2 = 7}
$7|\boxed{7}, \boxed{7}|3+4=7.|007|+ 7
"""
WRONG = r"""
3 + 4 = 8|7 is not the answer, it is 9||seven|-7|7 and 9|7.5|17|77|0.7|1,007|<answer></answer>|<answer>8</answer> 7
7 #### 8|$7$ and $9$
"""
ONLY_THE_QUESTION = r"3 + 4|3+4|$3+4$|14/2|\frac{14}{2}|$14 \div 2$|3 + 4 =|$3 4$|\boxed{3+4}|7^1|$\sqrt{49}$|$|-7|$"


def cases(text: str) -> list[str]:
    return [case for line in text.strip("\n").splitlines() for case in line.split("|")]


@pytest.mark.parametrize("answer", cases(RIGHT))
def test_right(answer: str) -> None:
    assert math([answer], gold=["7"]) == [1.0]


@pytest.mark.parametrize("answer", cases(WRONG))
def test_wrong(answer: str) -> None:
    assert math([answer], gold=["7"]) == [0.0]


@pytest.mark.parametrize("answer", cases(ONLY_THE_QUESTION))
def test_repeating_the_question_is_no_answer(answer: str) -> None:
    assert math([answer], gold=["7"]) == [0.0]


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("1,000", "1000", 1),
        ("1/2", "0.5", 1),
        ("0.5", r"$\frac{1}{2}$", 1),
        ("0.5", "1/4 + 1/4", 0),
        (r"\frac{1}{2}", "1/2", 1),
        (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", 1),
        (r"2\sqrt{3}", "2", 0),
        ("x=7", "7", 1),
        ("x^2+1", "$1+x^2$", 1),
        ("(1,2)", "$(1,2)$", 1),
        (r"\{1,2\}", r"\boxed{1,2}", 1),
        ("50%", "0.5", 1),
        ("72 dollars", "72", 1),
        ("$12.50", "$12.50", 1),
        ("1e-3", "0.001", 1),
        ("+7", "7", 1),
        ("\u22127", "-7", 1),
        ("-7", "3 - 10 = -7", 1),
        ("Some steps\n#### 1,234", "So 1234", 1),
        (7, "7", 1),
        ("0", "", 0),
        (r"2\sqrt{3}", r"<answer>\sqrt{12}</answer>", 1),
        (r"2\sqrt{3}", r"<answer>2\sqrt{2}</answer>", 0),
        (r"2\sqrt{3}", r"<answer>$\sqrt{12}$</answer>", 1),
        ("x^2+1", "<answer>1+x^2</answer>", 1),
        (r"\frac{\pi}{2}", r"<answer> \frac{2\pi}{4} </answer>", 1),
        (r"\frac{3}{4}", r"<answer>\frac{6}{8}</answer>", 1),
        ("7", "<answer>14/2</answer>", 0),
        ("(1,2)", "<answer>(1,2)</answer>", 1),
        ("yes", "<answer>yes</answer>", 1),
        ("yes", "<answer>Yes.</answer>", 1),
        ("yes", r"So \boxed{\text{yes}}", 1),
        ("Yes", "The answer is yes.", 1),
        ("#### no", "no", 1),
        ("yes", "<answer>no</answer>", 0),
        ("yes", "<answer>sey</answer>", 0),
        ("east", "seat", 0),
        ("yes", "", 0),
        (r"\pi", r"<answer>\frac{2\pi}{2}</answer>", 1),
        ("yes", r"\[\text{Yes}\]", 1),
        ("B", "<answer>B</answer>", 1),
        ("(B)", "The answer is (B).", 1),
        ("B", "<answer>C</answer>", 0),
        ("ab", "<answer>ba</answer>", 1),
        (r"5\text{ cm}", "Thus\n\n$$\n5\\text{ cm}\n$$", 1),
        ("7", "With\n$$\n3+4\n$$\nit is\n\\[\n7 \\text{ cm}^2\n\\]\n", 1),
        ("50%", "Thus\n\n$$\n50\\%\n$$", 1),
        (r"\sin 20^\circ", "$e^{99999x}$", 0),  # at once
        ("50%", "Thus \\[50\\%\\]", 1),
        ("7", "With\n$$\n7\n$$\nit is\n\\[\n8 \\text{ cm}^2\n\\]\n", 0),
    ],
)
def test_gold_forms(gold: object, answer: str, right: int) -> None:
    assert math([answer], gold=[gold]) == [right]


# gold answer § right § right §! wrong
WRITTEN = r"""
2\sqrt{3} § <answer>2√3</answer> § The answer is 2√3. § $2√3$ §! 2√2
\sqrt{2} § sqrt(2) § √2 §! 2
\frac{1}{2} § ½ § \boxed{50\%} § .5 §! 1 1/2
50% § \boxed{50\%} § 50 percent § $50\%$
\$72 § 72 § $72 § \$72 § 72 dollars
-$18 § -18 § -$18 § $-18 § −18 § –18 § (-18) §! 18 §! <answer>18</answer>
(1,2) § (1, 2) §! (2, 1) §! 1 and 2 or 3
\{1,2,3\} § {1, 2, 3} § 3, 2, 1 §! 1, 2 §! 3
2, 3 § 2 and 3 § x = 2 or x = 3 § 3, 2 §! 3 §! 2
3 § x = 3 § "3" § [3] § ３ § <answer>`3`</answer> § 3, 3 §! 3 or 4 §! 4 or 3 §! 8 or maybe 3 §! It is 4 or 3.
3 §! <answer>3, 4</answer> §! <answer>4 3</answer> §! <answer>1, 2, 3</answer>
3 §! The answer is 3 or 4. §! #### 4 or 3 §! 4 3
3 § <answer>3 § <answer><answer>3</answer></answer> § <ANSWER>3</ANSWER> §! <answer>4</answer> <answer>3 §! <answer>4 3
3 § <think>4</think>3 § 4</think>3 §! <think><answer>3</answer></think>4 §! <think>3 §! 3</think>
3 § \fbox{3} § \boxed{3.} § <answer>\text{3}</answer> § \boxed{3_{10}} §! \boxed{4}, \boxed{3} §! \boxed{3e1} §! 3e1
1000 § \boxed{1\,000} § 1 000 § 1{,}000 § 1e3 §! 1.000
x^2 § <answer>x²</answer> § x² §! x³
10^{5} § 10⁵ § 100000 § 1e5
1500 § 1.5e3 § 1.5 × 10^3 § \boxed{1.5 \times 10^3} § 1.5 \times 10^{3} §! 1.5e2
6.02e23 § \boxed{6.02\times10^{23}}
5/2 § 2 1/2 § 2½ § \boxed{2\frac12} § = 2\frac{1}{2} § So it is \dfrac{5}{2}. §! 2 1/3 §! 21/2
1/3 § Then 3 thirds, so \frac{1}{3} §! Then 2\frac{1}{3} §! It is -\frac{1}{3}.
2 1/2 § 2.5 § \boxed{2\frac{1}{2}} §! 1/2
\infty § ∞ § infinity § <answer>∞</answer> §! -\infty §! $-∞$
infinity § \boxed{\infty} § infinity
\frac{\pi}{3} § π/3 § pi/3 § $π/3$ §! 1/3
2x+3 § 3 + 2x §! 2x + 4
2+3i § 2 + 3i §! 2 - 3i
x>3 § x > 3 §! x < 3
yes § The answer is: yes § So the answer is **yes**! § **Answer:** Yes
yes §! \boxed{no}, \boxed{yes} §! yes or no §! I do not answer yes
true § <answer>`True`</answer> §! false
B § \boxed{\textbf{(B)}~12} § \boxed{\text{(B) }12} § The correct option is B. § Option B §! \boxed{\textbf{(C)}~12}
B § \boxed{\text{B. 12}} § <answer>(B) Paris</answer> § B: Paris § B) §! A. not B §! B) or C) §! C
12:30 § It leaves at 12:30. § \boxed{12:30} §! 2:5 §! 30 §! 12:31
9 a.m. § at 9 am § 9 AM §! 9 pm §! 9
8 § The answer is not 7 but 8. §! The answer is not 8 but 7. § This was not hard: 8
8 §! The answer is not 8. §! It is not 8 §! \boxed{\neq 8} §! $x \ne 8$ §! x ≠ 8
12_5 § \boxed{12_5} § 12_{5} § \boxed{12} §! \boxed{12_3} §! 12_{3}
12_{10} § 12 §! 12_{11}
3:00 PM § 3:00 p.m. § \boxed{3:00 \text{ PM}} §! 3:00 am
2024-01-15 § On 2024-01-15. §! 2008 §! 2024-01-16
June 20 § June 20. §! 20 §! June 21
.5 § 0.5 §! 5
5 § x - 2 = 3. Then x = 5 § She needs at least 5 boxes § n must be at least $\boxed{5}$ § 8 minus 3 is 5
5 §! less than 5 §! x < 5 §! x ≥ 5 §! \boxed{\geq 5} §! \boxed{\neg 5} §! It isn't 5. §! anything but 5 §! more than 5
5 § The answer is 5 - a nice number. § total - 5 § 5 cm^2 § 5 m/s § 5N §! x + 5 §! y = 3x + 5 §! 5 + C §! 10 minus 5
5 §! minus 5 §! The answer is negative 5. §! －5 §! half of 5 §! square root of 5 §! (3, 5) §! 4 to 5 §! .5 §! 5x §! 5i
5 §! 5² §! 5^{2} §! 5 squared §! \boxed{5!} §! $5!$ §! 5 million §! \boxed{5 \text{ thousand}} §! 5 dozen
5 § \boxed{{5}} § \boxed{5~\text{km}} § \boxed{5\textup{ cm}} § \boxed{\color{red}5} § \textcolor{red}{5}
5 § __5__ § \boxed{5 \pmod 7}
5 m/s § 5 § 5 m/s §! 6 m/s
-5 § －5 § minus 5 § The answer is negative 5. §! 5
5 million § 5,000,000 § $5 million §! 5
3/4 § 75 per cent § 75 percent §! 75
45^\circ § 45° § 45 degrees
1/3 § 0.\overline{3} § \boxed{0.\dot{3}} §! 0.3
0.1\overline{6} § 1/6 § \boxed{\frac{1}{6}} §! 0 §! 0.1 §! 0.16
1.6\times10^{-19} § 1.6e-19 § 0.00000000000000000016 §! 1.7e-19 §! \boxed{1.6\times10^{-20}} §! 0
0.0000001 § 1e-7 §! 0.0000002
(-\infty, 2) § x < 2 § \boxed{2>x} §! x \le 2 §! x < 3
(1,2) §! 1 < x < 2
\emptyset § \varnothing § ∅ §! 0
(x+1)^{200} §! \infty §! $\frac{\infty}{\pi}-9$ §! $\log_{\infty}(|\infty-3|)$ §! <answer>7\%\%=(e,1)</answer>
5 §! The answer is \sin(5). §! sqrt 5
(x+1)^{1000} § (x+1)^{999}(1+x) § (1+x)^{1000} §! (x+1)^{999}
\frac{x^{999}-1}{x-1} § \boxed{\frac{1-x^{999}}{1-x}} §! \boxed{\frac{1-x^{998}}{1-x}}
y=x^{500}+1 § 1 + x^{500} § $y=1+x^{500}$ §! $y=2+x^{500}$
\sqrt{2^{1000}} § $2^{500}$ §! $2^{501}$
\frac{3\pm\sqrt{5}}{2} § \frac{3+\sqrt5}{2},\frac{3-\sqrt5}{2} § x = \frac{6\pm2\sqrt{5}}{4} §! \frac{3\pm\sqrt{7}}{2}
\pm\frac{1}{2} § \frac{\pm 1}{2} § \frac{1}{2}, -\frac{1}{2} §! \frac12
(-\infty,-1)\cup(2,\infty) § \boxed{x<-1 \text{ or } x>2} § x > 2 or x < -1 §! $x<-1$ or $x\ge 2$ §! $x<-1$ §! x > 2
x<-1 \text{ or } x>2 § $(-\infty,-1)\cup(2,\infty)$ § $x>2 \text{ or } x<-1$ §! $x>2$
\mathbb{R} § $\mathbb R$ § \Bbb{R} § \boxed{\mathbb R} §! \mathbb{Z} §! \mathbb Z
33\frac{1}{3}\% § 1/3 § \frac{1}{3} § \boxed{33\frac13\%} § 33 1/3% §! 33\% §! 33 §! 34%
1/3 § $33\frac{1}{3}\%$ § \boxed{33\frac{1}{3}\%} § \frac{100}{3}\% §! \boxed{\frac{1}{3}\%}
5! § 120 § 5! § \boxed{5!} §! 5 §! \boxed{5}
\begin{pmatrix}1\\2\end{pmatrix} § \begin{bmatrix} 1 \\ \frac42 \end{bmatrix} §! \begin{bmatrix}2\\1\end{bmatrix}
3+4i § $3 + 4 i$ § 3 + 4 i §! $3 - 4 i$
\frac12 § $\boxed{\displaystyle\frac{1}{2}}$ § \dfrac12 §! (-3,\frac{1}{2}) §! <answer>A=\frac{1}{2}bh</answer>
even § $\boxed{\displaystyle \text{even}}$
x^2+y^2=9 § $9 = x^2+y^2$ § $x^2+y^2-9=0$ §! $x^2+y^2=3$ §! 9 §! $x^2-y^2=9$
3x-4y+5=0 § $4y = 3x+5$ § $6x-8y+10=0$ §! $3x-4y=5$ §! 0 §! \boxed{0}
y=2x+3 § $2x-y+3=0$ §! $y=2x-3$ §! \boxed{\vec{v}=(1,2)}
x=5,y=3 § y = 3, x = 5 §! x=3,y=5 §! 5
x\in[0,1] § $x\in[0,1]$ §! \boxed{k=-1} §! \boxed{y=2x+3}
y=x^{500}+2x §! $y=x^{500}+2x+1$
\sin 20^\circ § \cos 70^\circ § $\cos 70°$ § \boxed{\sin\frac{\pi}{9}} § \sin(20^{\circ}) §! \cos 20^\circ §! 20^\circ
\frac{\sqrt{6}-\sqrt{2}}{4} § \sin 15^\circ § $\cos 75^\circ$ §! \cos 15^\circ
2\cos 40^\circ § 2\sin 50^\circ § 2 \cos \frac{2\pi}{9} §! 2\sin 40^\circ
\sin^2 20^\circ § 1-\cos^2 20^\circ § \cos^2 70^\circ §! \sin^2 70^\circ
16^{\circ}40' § 16^\circ 40' §! 56 §! 16^\circ 20'
1<x<5 § $5>x>1$ § 5 > x > 1 § x\in(1,5) § (1,5) §! 5>x>2 §! [1,5] §! x<5 §! $5\ge x>1$
-2\le x<3 § $3>x\ge -2$ § [-2,3) §! (-2,3]
(A), (C) § A, C § C, A § \boxed{\text{A, C}} § The correct options are A and C. § AC §! A or C §! A §! A, B, C
ACD § A, C, D § (A)(C)(D) § D, C, A § \boxed{ACD} §! ABD §! A, C §! A, B, C, D
AB § A \cdot B § BA §! AC
x=1, y=2 § (1,2) § y = 2, x = 1 §! (2,1) §! x=2,y=1
(1,2,3) § x=1,y=2,z=3 §! x=3,y=2,z=1
3+4i § $3+4\mathrm{i}$ § 3+4\text{i} §! 7
2\pi r h § 2\pi h r § \boxed{2\pi r h} §! 2\pi r
10b + c § c+10b § $10b+c$ §! 10 §! 10b
2ab § 2ba § $2 a b$ §! 2
2n+3m § 3m+2n §! 2n+3
-5 § -5 m § 5 - 10 = -5 m §! 5 m
"""  # noqa: RUF001


@pytest.mark.parametrize("line", WRITTEN.strip().splitlines())
def test_ways_of_writing(line: str) -> None:
    gold, *answers = line.split(" §")
    for answer in answers:
        assert math([answer.removeprefix("!").strip()], gold=[gold]) == [float(answer[0] != "!")], answer


@pytest.mark.parametrize(
    "answer",
    [
        "$9^{9^{9^{9}}}$",
        r"\boxed{(10^9)!}",
        r"$\prod_{i=1}^{10^9} i$",
        "$" + "(" * 99 + "7" + ")" * 99 + "$",
        r"$(1+\sqrt{2}+\sqrt{3})^{99999}$",
        r"$\cos(x+y+z+w+u+v)^{30}$",
        r"$\frac{x^{999}-1}{x^{998}-1}$",
        r"$\sqrt{10^{9999}+1}$",
        r"$\tan(9^{99999})+\sin(8^{99999})$",
        r"$10^{12}\ln 3$",
        r"$e^{99999x}$",
    ],
    ids=str.split,
)
@pytest.mark.parametrize("gold", ["7", r"\{1,2\}", r"2\sqrt{3}", "x-1", r"\cos x", r"\log_2 3"])
def test_what_would_take_for_ever_is_wrong(answer: str, gold: str) -> None:
    assert math([answer], gold=[gold]) == [0.0]


def test_gold_that_cannot_be_used() -> None:
    with pytest.raises(BirlError, match="completion 1: its row has no right answer"):
        math(["7", "7"], gold=["7", None])
    with pytest.raises(BirlError, match="the gold answer '' cannot be read"):
        math(["7"], gold=[""])


HEADED = (
    "#### 1. Find x\nIt is 7.\n\nThe answer is \\boxed{7}.",
    "#### Step 3: 4 + 5\nSo the answer is 7.",
    "#### Answer\n7",
    "#### 7\n\nQuestion: What is 4 + 4?\n#### Part 8\nWell",
    "#### 7 apples\nDone.",
    "So\n#### $7.\n\n",
)


@pytest.mark.parametrize("answer", HEADED)
def test_a_heading_is_no_answer(answer: str) -> None:
    assert math([answer], gold=["7"]) == [1.0]


def test_generated_statements() -> None:
    rng = random.Random(0)
    forms = [
        "{a} + {b} = {s}",
        "The answer is {s}.",
        "{s}",
        r"\boxed{{{s}}}",
        "${s}$",
        "{a} plus {b} is {s}",
        "<answer>{s}</answer>",
    ]
    for _ in range(300):
        a, b, off = rng.randint(-99, 99), Fraction(rng.randint(0, 400), 4), rng.choice([0, 0, 1, -1, 10])
        text = rng.choice(forms).format(a=abs(a), b=float(b), s=float(a + b + off))
        assert math([text], gold=[str(float(a + b))]) == [float(off == 0)], text
