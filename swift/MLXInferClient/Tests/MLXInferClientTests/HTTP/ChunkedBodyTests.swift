import Testing

@testable import MLXInferClient

struct ChunkedBodyTests {
    private func parsed(_ body: String, cut cuts: [Int] = []) -> Parsed {
        let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n".bytes
        return Parsed(head + body.bytes, cut: cuts.map { $0 + head.count })
    }

    @Test(arguments: [
        "5\r\nhello\r\n0\r\n\r\n", "00000005\r\nhello\r\n0\r\n\r\n", "5;name=value\r\nhello\r\n0;last\r\n\r\n",
        "5 ; a=\"b c\"\r\nhello\r\n0\r\n\r\n",
        "1\r\nh\r\n1\r\ne\r\n3\r\nllo\r\n0\r\nA: b\r\nC: d\r\n\r\n", "5\r\nhello\r\n0\r\n\r\nrest", "5\r\nhello\r\n000\r\n\r\n",
    ])
    func decoded(_ body: String) {
        for cuts in splits(of: body.bytes.count) {
            let parsed = parsed(body, cut: cuts)
            #expect(parsed.text == "hello" && parsed.ended && parsed.failure == nil, "cut at \(cuts)")
        }
    }

    @Test func dataMayLookLikeFraming() {
        #expect(parsed("8\r\n0\r\n\r\nA\r\n\r\na\r\n0123456789\r\n0\r\n\r\n").text == "0\r\n\r\nA\r\n0123456789")
    }

    @Test(arguments: [
        "\r\n", "x\r\nhello", "-5\r\nhello", "+5\r\nhello", "0x5\r\nhello", "5h\r\nhello", "5 5\r\nhello", ";a\r\n", "5\nhello",
        "4\r\nhello\r\n0\r\n\r\n",
        "5\r\nhello0\r\n\r\n", "123456789\r\n", "FFFFFFFFFFFFFFFFF\r\n", "5\r\nhello\r\n0\r\n\u{7F}\r\n\r\n",
    ])
    func malformed(_ body: String) {
        for cuts in splits(of: body.bytes.count, random: 5) {
            let parsed = parsed(body, cut: cuts)
            #expect(parsed.isMalformed && !parsed.ended, "cut at \(cuts)")
        }
    }

    @Test func whatCameBeforeTheMistakeIsHandedOut() {
        let body = "5\r\nhello\r\nnonsense\r\n"
        for cuts in splits(of: body.bytes.count) { #expect(parsed(body, cut: cuts).text == "hello") }
    }

    @Test(arguments: [
        "", "5", "5\r", "5\r\n", "5\r\nhel", "5\r\nhello", "5\r\nhello\r\n", "5\r\nhello\r\n0\r\n", "5\r\nhello\r\n0\r\nA: b\r\n",
    ])
    func truncated(_ body: String) {
        #expect(parsed(body).isTruncated)
    }

    @Test func limits() {
        #expect(parsed("5;" + String(repeating: "x", count: 5000)).isMalformed)
        #expect(parsed("0\r\n" + String(repeating: "A: b\r\n", count: 65)).isMalformed)
    }
}
