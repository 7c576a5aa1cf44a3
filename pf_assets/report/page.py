"""How the report looks in a browser: one page that needs no network, readable on a phone and in print.

Verdicts are told by a mark and a word, not by colour alone. The template holds no logic but loops and what is missing.
"""

STYLE = """
:root { --ink: #1f2328; --soft: #656d76; --line: #d8dee4; --wash: #f6f8fa; --brand: #bd081c;
  --reproduced: #1a7f37; --not-distinguishable: #9a6700; --contradicted: #cf222e; --not-run: #8c959f; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: #fff;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 24px 20px 80px; }
h1 { font-size: 30px; line-height: 1.2; margin: 8px 0 4px; }
h2 { font-size: 22px; margin: 0; }
h3 { font-size: 16px; margin: 20px 0 6px; }
a { color: inherit; }
p { margin: 6px 0; }
.soft { color: var(--soft); }
.small { font-size: 13px; }
.lead { font-size: 18px; color: var(--soft); margin: 0 0 20px; }
.share { display: flex; height: 30px; border-radius: 6px; overflow: hidden; margin: 12px 0 14px; }
.share div { color: #fff; font-weight: 600; text-align: center; line-height: 30px; overflow: hidden; min-width: 0; }
.counts { display: grid; grid-template-columns: repeat(4, 1fr); gap: 12px; margin-bottom: 28px; }
.counts div { border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; }
.counts b { display: block; font-size: 30px; line-height: 1.1; }
.reproduced { --tone: var(--reproduced); } .not-distinguishable { --tone: var(--not-distinguishable); }
.contradicted { --tone: var(--contradicted); } .not-run { --tone: var(--not-run); }
.share .reproduced, .share .not-distinguishable, .share .contradicted, .share .not-run { background: var(--tone); }
.counts b, .tone { color: var(--tone); }
.badge { display: inline-block; white-space: nowrap; color: #fff; background: var(--tone); border-radius: 12px;
  padding: 1px 10px; font-size: 13px; font-weight: 600; }
.glance { width: 100%; border-collapse: collapse; }
.glance td { padding: 5px 8px 5px 0; border-bottom: 1px solid var(--line); vertical-align: middle; }
.glance td:first-child { white-space: nowrap; }
.chip { display: inline-block; width: 24px; height: 24px; line-height: 24px; text-align: center; border-radius: 5px;
  background: var(--tone); color: #fff; font-weight: 700; text-decoration: none; margin: 1px; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(220px, 1fr)); gap: 8px 20px; margin: 8px 0; }
.facts dt { color: var(--soft); font-size: 13px; } .facts dd { margin: 0; overflow-wrap: anywhere; }
section { border-top: 3px solid var(--ink); margin-top: 44px; padding-top: 12px; }
section > header { display: flex; flex-wrap: wrap; gap: 4px 16px; align-items: baseline;
  justify-content: space-between; }
.scroll { overflow-x: auto; margin: 12px 0; }
table.numbers { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; width: 100%; }
table.numbers th, table.numbers td { padding: 4px 10px; text-align: right; white-space: nowrap; }
table.numbers th { font-weight: 600; border-bottom: 1px solid var(--line); }
table.numbers tr.groups th[colspan="2"] { text-align: center; border-bottom: 0; }
table.numbers th:first-child, table.numbers td:first-child { text-align: left; }
table.numbers td { border-bottom: 1px solid #eef1f4; vertical-align: top; }
table.numbers td.paper { color: var(--soft); border-left: 1px solid var(--line); }
table.numbers tr.base td { background: #fdf3f4; font-weight: 600; }
table.numbers small { display: block; color: var(--soft); font-weight: 400; font-size: 11.5px; }
figure { margin: 14px 0; } figure img { width: 100%; max-width: 1000px; height: auto; display: block; }
figcaption { color: var(--soft); font-size: 14px; }
.claim { border-left: 5px solid var(--tone); background: var(--wash); border-radius: 0 6px 6px 0; padding: 8px 14px;
  margin: 10px 0; break-inside: avoid; }
.claim .head { display: flex; gap: 10px; align-items: baseline; justify-content: space-between; }
.claim .says { font-weight: 600; }
.statistic { display: grid; grid-template-columns: minmax(0, 1fr) 170px 230px; gap: 12px; align-items: center;
  font-size: 13px; margin-top: 4px; }
.statistic code { font-size: 12px; color: var(--soft); overflow-wrap: anywhere; }
.statistic svg { width: 170px; height: 16px; }
.why { font-size: 14px; margin-top: 6px; } .why.open { color: var(--contradicted); }
details summary { cursor: pointer; color: var(--soft); font-size: 13px; }
@media (max-width: 720px) {
  .counts { grid-template-columns: repeat(2, 1fr); }
  .statistic { grid-template-columns: 1fr; gap: 0; margin-top: 8px; }
  .claim .head { flex-direction: column; gap: 2px; }
  .glance td:first-child { white-space: normal; }
  main { padding: 12px 12px 60px; }
}
@media print {
  body { font-size: 11pt; } section, .claim, figure, tr { break-inside: avoid-page; } section { break-inside: auto; }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
}
"""

PAGE = (
    """
{%- macro kind(verdict) %}{{ verdict | replace(" ", "-") }}{% endmacro %}
{%- macro badge(verdict) %}
<span class="badge {{ kind(verdict) }}">{{ marks[verdict] }} {{ verdict }}</span>
{%- endmacro %}
{%- macro line(statistic) %}
{% set w = statistic.whisker %}
<svg viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{{ statistic.interval }}"
 class="{{ kind(statistic.verdict) }}">
{% if w.margin %}
<rect x="{{ w.margin[0] }}" y="0" width="{{ w.margin[1] - w.margin[0] }}" height="10" fill="#dfe5ea"/>
{% endif %}
<line x1="{{ w.zero }}" x2="{{ w.zero }}" y1="0" y2="10" stroke="#57606a" stroke-width="0.7"/>
<line x1="{{ w.low }}" x2="{{ w.high }}" y1="5" y2="5" stroke="var(--tone)" stroke-width="2"/>
<ellipse cx="{{ w.at }}" cy="5" rx="2.5" ry="2.7" fill="var(--tone)"/></svg>
{%- endmacro %}
{%- macro shown(claim) %}
<div class="claim {{ kind(claim.verdict) }}" id="{{ claim.id }}">
<div class="head"><span class="says">{{ claim.says }}</span>{{ badge(claim.verdict) }}</div>
<div class="small soft">{{ claim.where }} · {{ claim.id }}</div>
{% for statistic in claim.statistics %}
<div class="statistic"><code>{{ statistic.text }}</code>{{ line(statistic) }}
<span class="{{ kind(statistic.verdict) }}"><b class="tone">{{ statistic.estimate }}</b>
 <span class="soft">({{ statistic.interval }})</span></span></div>
{% endfor %}
{% if claim.missing %}<div class="small soft">Needs: {{ claim.missing }}</div>{% endif %}
{% if claim.explanation %}
<div class="why{{ " open" if claim.explanation == "not yet explained" }}"><b>Why:</b> {{ claim.explanation }}</div>
{% endif %}
</div>
{%- endmacro %}
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>PinnerFormer: what the paper claims, and what holds here</title>
<style>"""
    + STYLE
    + """</style></head><body><main>
<h1>What the paper claims, and what holds here</h1>
<p class="lead">PinnerFormer (KDD 2022), every offline table and figure, trained anew and judged by one rule.</p>
<div class="share" role="img" aria-label="verdicts">
{% for verdict, count in report.counts.items() if count %}
<div class="{{ kind(verdict) }}" style="flex: {{ count }}">{{ marks[verdict] }}</div>
{% endfor %}
</div>
<div class="counts">
{% for verdict, count in report.counts.items() %}
<div class="{{ kind(verdict) }}"><b>{{ marks[verdict] }} {{ count }}</b>{{ verdict }}
<br><span class="soft small">{{ report.share(verdict) }} of {{ report.num_claims }} claims</span></div>
{% endfor %}
</div>

<h2>At a glance</h2>
<p class="soft small">One mark for each claim; every mark leads to its claim.</p>
<table class="glance">
{% for section in report.sections if section.claims %}
<tr><td><a href="#{{ section.name }}">{{ section.title }}</a> <span class="soft small">{{ section.where }}</span></td>
<td>{% for claim in section.claims %}<a class="chip {{ kind(claim.verdict) }}" href="#{{ claim.id }}"
 title="{{ claim.verdict }}: {{ claim.says }}">{{ claim.mark }}</a>{% endfor %}</td></tr>
{% endfor %}
</table>
{% if report.failed %}
<h3>What does not hold, or cannot be told</h3>
{% for claim in report.failed %}
<p>{{ badge(claim.verdict) }} <a href="#{{ claim.id }}">{{ claim.says }}</a>
{% if claim.is_ours %}<span class="soft small">(ours)</span>{% endif %}</p>
{% endfor %}
{% endif %}

<section id="setting"><header><h2>What was trained and judged</h2></header>
<dl class="facts">
{% for name, value in report.facts %}<div><dt>{{ name }}</dt><dd>{{ value }}</dd></div>{% endfor %}
</dl>
<h3>The rule</h3>
<ul>{% for sentence in report.rule %}<li>{{ sentence }}</li>{% endfor %}</ul>
</section>

{% for section in report.sections %}
<section id="{{ section.name }}">
<header><h2>{{ section.title }}</h2><span class="soft">{{ section.where }}</span></header>
{% for picture in section.pictures %}
<figure><img alt="{{ picture.title }}" src="data:image/png;base64,{{ picture.encoded }}">
{% if picture.text %}<figcaption><b>{{ picture.title }}.</b> {{ picture.text }}</figcaption>{% endif %}</figure>
{% else %}
<p class="soft">No figure: its recipes have not been run.</p>
{% endfor %}
{% if section.note %}<p class="soft">{{ section.note }}</p>{% endif %}
{% if section.table %}
<div class="scroll"><table class="numbers">
<thead><tr class="groups"><th></th>
{% for label, span in section.table.groups %}<th colspan="{{ span }}">{{ label }}</th>{% endfor %}</tr>
{% if "paper" in section.table.columns %}
<tr><th></th>{% for name in section.table.columns %}<th>{{ name }}</th>{% endfor %}</tr>
{% endif %}</thead>
<tbody>
{% for label, is_base, cells in section.table.rows %}
<tr{{ ' class="base"' | safe if is_base }}><td>{{ label }}</td>
{% for cell in cells %}
<td{{ ' class="paper"' | safe if cell.is_papers }}>{{ cell.text }}
{%- if cell.interval %}<small>{{ cell.interval }}</small>{% endif %}</td>
{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% endif %}
{% for claim in section.claims %}{{ shown(claim) }}{% endfor %}
</section>
{% endfor %}

<section id="runs"><header><h2>Runs</h2></header>
<details><summary>{{ report.runs | length }} recipes</summary>
<div class="scroll"><table class="numbers">
<thead><tr><th>recipe</th><th>seeds</th><th>minutes a seed</th><th>parameters</th><th>MLflow</th></tr></thead>
{% for name, seeds, minutes, parameters, url in report.runs %}
<tr><td>{{ name }}</td><td>{{ seeds }}</td><td>{{ minutes }}</td><td>{{ parameters }}</td>
<td>{% if url %}<a href="{{ url }}">run</a>{% endif %}</td></tr>
{% endfor %}
</table></div></details>
{% if report.left_out %}
<h3>Left out</h3><ul>{% for reason in report.left_out %}<li>{{ reason }}</li>{% endfor %}</ul>
{% endif %}
<p class="soft small">Tables 7 and 8 of the paper are A/B experiments: nothing offline reproduces them.</p>
</section>
</main></body></html>
"""
)
