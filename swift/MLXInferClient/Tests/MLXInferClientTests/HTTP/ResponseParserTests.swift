import Testing

@testable import MLXInferClient

struct ResponseParserTests {
    static let whole = [
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n",
        "HTTP/1.0 200\r\n\r\nhello",
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length:5\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\nX-Empty:\r\nX-Wide:  \t a b \t \r\n\r\nhello and what follows is ignored",
    ]

    @Test(arguments: whole)
    func everySplitGivesTheSame(_ text: String) {
        let expected = Parsed(text.bytes)
        #expect(expected.text == "hello")
        #expect(expected.ended && expected.failure == nil)
        for cuts in splits(of: text.bytes.count) { #expect(Parsed(text.bytes, cut: cuts) == expected, "cut at \(cuts)") }
    }

    @Test(arguments: whole)
    func whatIsCutOffIsNeverTakenForWhole(_ text: String) throws {
        let parsed = Parsed(text.bytes)
        let needed = try #require((1...text.bytes.count).first { Parsed(Array(text.bytes.prefix($0)), closed: false).text == parsed.text })
        for count in 0..<needed where parsed.head?.reason != "" {
            let cut = Parsed(Array(text.bytes.prefix(count)))
            #expect(cut.isTruncated && !cut.ended, "\(count) bytes")
        }
    }

    @Test func fieldsAreFoundWithoutRegardToCase() {
        let head = Parsed("HTTP/1.1 200 Fine so far\r\nX-Thing:  a \r\nx-thing: b\r\nContent-Type: Text/HTML; charset=x\r\n\r\n".bytes).head
        #expect(head?.reason == "Fine so far")
        #expect(head?.fields["X-THING"] == "a")
        #expect(head?.fields.values("x-Thing") == ["a", "b"])
        #expect(head?.contentType == "text/html")
    }

    @Test(arguments: [204, 304])
    func someStatusesHaveNoBody(status: Int) {
        let parsed = Parsed("HTTP/1.1 \(status) x\r\nContent-Length: 5\r\n\r\n".bytes)
        #expect(parsed.ended && parsed.body.isEmpty)
    }

    @Test(arguments: [
        "HTTP/2 200 OK\r\n\r\n", "HTTP/1.1 20 OK\r\n\r\n", "HTTP/1.1 0200 OK\r\n\r\n", "HTTP/1.1 +20 OK\r\n\r\n", "HTTP/1.1 600 x\r\n\r\n",
        "SSH-2.0-OpenSSH\r\n\r\n", "\r\n\r\n", "<html>\r\n", "HTTP/1.1 200 OK\n\n", "HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        "HTTP/1.1 200 OK\r\n: no name\r\n\r\n", "HTTP/1.1 200 OK\r\nspace : x\r\n\r\n", "HTTP/1.1 200 OK\r\n folded: x\r\n\r\n",
        "HTTP/1.1 200 OK\r\nA: b\rc\r\n\r\n", "HTTP/1.1 200 OK\r\nA: \u{0}\r\n\r\n", "HTTP/1.1 200 OK\r\nn\u{E4}me: x\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 1e3\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 0x10\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: \r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "HTTP/1.1 101 Switching Protocols\r\n\r\n",
    ])
    func malformed(_ text: String) {
        for cuts in splits(of: text.bytes.count, random: 5) {
            let parsed = Parsed(text.bytes, cut: cuts)
            #expect(parsed.isMalformed && !parsed.ended, "cut at \(cuts)")
        }
    }

    @Test func limits() {
        let long = "HTTP/1.1 200 OK\r\nA: " + String(repeating: "x", count: 20_000)
        let many = "HTTP/1.1 200 OK\r\n" + String(repeating: "A: b\r\n", count: 129) + "\r\n"
        let patient = String(repeating: "HTTP/1.1 100 Continue\r\n\r\n", count: 17)
        for text in [long, many, patient] { #expect(Parsed(text.bytes, closed: false).isMalformed) }
    }
}
